// SKELETON (parallel author owns)
package shard

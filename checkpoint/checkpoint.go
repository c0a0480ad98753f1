// SKELETON (checkpoint author owns)
package checkpoint

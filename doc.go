// Package moetor is the root of a distributed Mixture-of-Experts training engine; it holds no code.
//
// Read in this order: internal/train/step.go (a training step on one page), model (the mathematics, as if there were
// one device), parallel/pipeline (schedules as data), comm (moving bytes between ranks), checkpoint (what is on disk).
// The import policy is the text in layering_test.go.
package moetor

package main

import . "github.com/mmcloughlin/avo/build"

// pauseLoop writes what a thread does between two looks at a value that another thread is to change.
func pauseLoop() {
	TEXT("pause", NOSPLIT, "func()")
	Doc("pause gives way to the other thread of the core for some dozen cycles.")
	PAUSE()
	RET()
}

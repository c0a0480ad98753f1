module moetor

go 1.26.0

require (
	github.com/goccy/go-yaml v1.19.2
	github.com/klauspost/compress v1.20.4
	github.com/pkg/profile v1.7.0
	github.com/spf13/cobra v1.10.2
	golang.org/x/sys v0.50.0
	gonum.org/v1/hdf5 v0.0.0-20210714002203-8c5d23bc6946
)

require (
	github.com/felixge/fgprof v0.9.3 // indirect
	github.com/google/pprof v0.0.0-20211214055906-6f57359322fd // indirect
	github.com/inconshreveable/mousetrap v1.1.0 // indirect
	github.com/spf13/pflag v1.0.9 // indirect
)

// Command train is moetor: it trains Mixture-of-Experts language models on local or networked ranks.
//
// Exit codes: 0 done; 1 failed, or interrupted without a checkpoint; 2 wrong usage or configuration; 3 stopped by a signal after
// a complete checkpoint.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"moetor/internal/train"
)

const (
	exitDone    = 0
	exitFailed  = 1
	exitUsage   = 2
	exitStopped = 3
)

// version is the engine's, written into checkpoints.
const version = "0.1.0"

// A usageError is a mistake in a flag, a setting or an input file: exit 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// An exitCode ends the process with a status and without a further message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit %d", int(e)) }

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run executes one command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.Execute()
	if err == nil {
		return exitDone
	}
	var code exitCode
	if errors.As(err, &code) {
		return int(code)
	}
	code = codeOf(err)
	for _, line := range strings.Split(strings.TrimRight(err.Error(), "\n"), "\n") {
		fmt.Fprintln(stderr, "train:", line)
	}
	return int(code)
}

// codeOf is the exit code of a command that ends with err.
func codeOf(err error) exitCode {
	var u usageError
	var r train.RefusedError
	if errors.As(err, &u) || errors.As(err, &r) {
		return exitUsage
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "train",
		Short: "Train Mixture-of-Experts language models on ordinary machines",
		Long: `train is moetor: a distributed Mixture-of-Experts training engine in one binary.

  train launch -n 4 --config demo      four ranks, three stages, on embedded text
  train config list                    what can be trained
  train inspect runs/demo              what is in a checkpoint`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version,
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w (see %s --help)", err, c.CommandPath())
	})
	root.AddCommand(launchCommand(), runCommand(), evalCommand(), generateCommand(), inspectCommand(), scheduleCommand(), configCommand(), benchCommand())
	wrapArgs(root)
	return root
}

// wrapArgs makes wrong arguments and unknown commands usage errors.
func wrapArgs(c *cobra.Command) {
	check := c.Args
	if check == nil && c.HasSubCommands() {
		check = func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			c.SuggestionsMinimumDistance = 2
			if near := c.SuggestionsFor(args[0]); len(near) > 0 {
				return fmt.Errorf("unknown command %q for %q: did you mean %s?", args[0], c.CommandPath(), strings.Join(near, " or "))
			}
			return fmt.Errorf("unknown command %q for %q (see %s --help)", args[0], c.CommandPath(), c.CommandPath())
		}
		c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	}
	if check != nil {
		c.Args = func(c *cobra.Command, args []string) error { return usage(check(c, args)) }
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

// printJSON writes v alone on stdout.
func printJSON(c *cobra.Command, v any) error {
	enc := json.NewEncoder(c.OutOrStdout())
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"moetor/parallel/pipeline"
)

func scheduleCommand() *cobra.Command {
	var (
		stages, micros int
		file           string
		forward, input float64
		weight, send   float64
		asJSON         bool
	)
	c := &cobra.Command{
		Use: "schedule [NAME]", Args: cobra.MaximumNArgs(1),
		Short: "Print a pipeline schedule as text and simulate it",
		Long: `Print the actions of every pipeline rank (2F0 is stage 2, forward, micro-batch 0; B backward, SA/RA and SG/RG
sends and receives) and what the simulator says of them: time in units of the costs given, idle time and the most
activations alive on each rank. --file reads a schedule written by hand in the same text, and checks it.
Names: ` + strings.Join(pipeline.Names(), ", "),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := readSchedule(args, file, stages, micros)
			if err != nil {
				return usage(err)
			}
			t, err := pipeline.Simulate(s, pipeline.Cost{Forward: forward, Input: input, Weight: weight, Send: send}, 1)
			if err != nil {
				return usage(err)
			}
			if asJSON {
				return printJSON(c, map[string]any{"schedule": s.String(), "total": t.Total, "idle": t.Idle, "peak": t.Peak})
			}
			fmt.Fprint(c.OutOrStdout(), s)
			fmt.Fprintf(c.OutOrStdout(), "# total %.4g, idle per rank %.4g, peak activations per rank %d\n", t.Total, t.Idle, t.Peak)
			return nil
		},
	}
	c.Flags().IntVarP(&stages, "stages", "p", 4, "pipeline stages, one per rank")
	c.Flags().IntVarP(&micros, "micros", "m", 8, "micro-batches")
	c.Flags().StringVar(&file, "file", "", "read the schedule from this file instead")
	c.Flags().Float64Var(&forward, "forward", 1, "cost of a forward")
	c.Flags().Float64Var(&input, "input", 1, "cost of an input gradient")
	c.Flags().Float64Var(&weight, "weight", 1, "cost of a weight gradient")
	c.Flags().Float64Var(&send, "send", 0, "time a message is on its way")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func readSchedule(args []string, file string, stages, micros int) (pipeline.Schedule, error) {
	if file != "" {
		if len(args) > 0 {
			return pipeline.Schedule{}, fmt.Errorf("--file %s and a name %q: give one of the two", file, args[0])
		}
		f, err := os.Open(file)
		if err != nil {
			return pipeline.Schedule{}, fmt.Errorf("--file: %w", err)
		}
		defer f.Close()
		s, err := pipeline.Parse(f)
		if err != nil {
			return s, fmt.Errorf("%s: %w", file, err)
		}
		return s, nil
	}
	name := "1f1b"
	if len(args) == 1 {
		name = args[0]
	}
	if stages > 4096 || micros > 65536 || stages*micros > 1<<20 {
		return pipeline.Schedule{}, fmt.Errorf("--stages %d and --micros %d: at most 4096, 65536 and together 1048576 cells", stages, micros)
	}
	if stages < 1 || micros < 1 {
		return pipeline.Schedule{}, fmt.Errorf("--stages %d and --micros %d must be at least 1", stages, micros)
	}
	s, err := pipeline.Generate(name, pipeline.Straight(stages, micros))
	if err != nil {
		return s, err
	}
	return pipeline.Prepare(s)
}

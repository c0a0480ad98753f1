package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"moetor/configs"
	"moetor/internal/train"
)

// configFlags are the flags of every command that takes a run configuration.
type configFlags struct {
	name string
	sets []string
}

func (f *configFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.name, "config", "", "preset (see train config list) or YAML file")
	c.Flags().StringArrayVar(&f.sets, "set", nil, "override a setting: path=value, such as stages.0.steps=30 (repeatable)")
}

// load reads the configuration and checks every rule between settings for a number of ranks; 0 ranks checks what
// does not depend on it.
func (f *configFlags) load(ranks int) (*configs.Run, error) {
	run, err := configs.Load(f.name, f.sets)
	if err != nil {
		return nil, usage(err)
	}
	return run, usage(configs.Validate(run, ranks))
}

func configCommand() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "List, print and explain run configurations"}
	var asJSON bool
	list := &cobra.Command{
		Use: "list", Short: "List the embedded presets", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if asJSON {
				return printJSON(c, configs.List())
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
			for _, p := range configs.List() {
				fmt.Fprintf(w, "%s\t%s\n", p.Name, p.About)
			}
			return w.Flush()
		},
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.AddCommand(list, configShowCommand())
	return c
}

func configShowCommand() *cobra.Command {
	var (
		f        configFlags
		schedule bool
		asJSON   bool
		ranks    int
	)
	c := &cobra.Command{
		Use: "show [NAME|FILE]", Short: "Print a configuration with every default spelled out, or its schedule", Args: cobra.MaximumNArgs(1),
		Long: `Print the resolved configuration as YAML. With --schedule print, before anything is run, the table of
steps at which the batch size, the learning rate, the bias speed or the MTP weight change.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 {
				f.name = args[0]
			}
			var run *configs.Run
			var err error
			if f.name == "" { // the defaults alone
				if run, err = configs.Parse([]byte("{}"), "defaults", f.sets); err != nil {
					return usage(err)
				}
			} else if run, err = f.load(ranks); err != nil {
				return err
			}
			if !schedule {
				text := configs.Marshal(run)
				if asJSON {
					if text, err = yaml.YAMLToJSON(text); err != nil {
						return err
					}
				}
				_, err := c.OutOrStdout().Write(text)
				return err
			}
			table, err := configs.ScheduleTable(run, ranks, func(i int) (int64, error) { return epochSamples(run, i) })
			if err != nil {
				return usage(err)
			}
			if asJSON {
				return printJSON(c, table)
			}
			fmt.Fprint(c.OutOrStdout(), table)
			return nil
		},
	}
	f.add(c)
	c.Flags().BoolVar(&schedule, "schedule", false, "print the schedule of every stage")
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().IntVarP(&ranks, "ranks", "n", 0, "check the configuration for this many ranks")
	return c
}

// epochSamples opens the data of a stage to count the samples of an epoch.
func epochSamples(run *configs.Run, i int) (int64, error) {
	tok, err := train.OpenTokenizer(run)
	if err != nil {
		return 0, err
	}
	corpus, err := train.OpenCorpus(context.Background(), run, i, tok)
	if err != nil {
		return 0, err
	}
	defer corpus.Close()
	return corpus.Train.Samples(), nil
}

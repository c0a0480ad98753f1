package train

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"

	"moetor/internal/trace"
	"moetor/internal/train/objective"
	"moetor/model"
	"moetor/optimizer"
)

// report collects what the step did, times apart.
func (t *Trainer) report(v optimizer.Values, s Sums, norm float64) Report {
	next := t.stage.plan.Advance(t.pos)
	r := Report{Stage: t.stage.cfg.Name, Step: next.Step, Tokens: next.Tokens, LR: v.Rate, Batch: v.Batch,
		Loss: s.Loss / s.Weight, MTPLoss: s.MTP / s.Weight, AuxLoss: s.Aux / s.Weight,
		GradNorm: norm, stop: s.Stop, real: s.Tokens}
	r.Sums = t.stage.named(s, "")
	if t.root() {
		for l, counts := range s.Counts {
			maxVio, dead, entropy := model.Balance(counts)
			r.MoE = append(r.MoE, RouterLoad{Layer: t.run.Model.DenseLayers + l, MaxVio: maxVio, Dead: dead, Entropy: entropy})
		}
	}
	return r
}

// named gives what the objective added up, as means under its names.
func (s *stage) named(sums Sums, prefix string) map[string]float64 {
	if s.objective == nil {
		return nil
	}
	m := map[string]float64{}
	for _, v := range objective.Report(s.objective, sums.Metrics, sums.Weight) {
		m[prefix+v.Name] = v.Value
	}
	return m
}

// timed adds the times of the step.
func (r *Report) timed(t *Trainer, b trace.Breakdown) {
	seconds := b.Total.Seconds()
	r.StepMS = float64(b.Total.Microseconds()) / 1000
	r.TokS = r.real / seconds
	r.MFU = r.real * t.flops.Training / seconds / (t.peak * 1e9)
	r.Time = b.Milliseconds()
	if t.root() {
		r.MemMB = residentMB()
	}
}

// residentMB is the resident memory of this process in MiB, where the system tells it; elsewhere what the Go runtime
// has obtained.
func residentMB() float64 {
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			if pages, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				return math.Round(float64(pages)*float64(os.Getpagesize())/(1<<20)*10) / 10
			}
		}
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return math.Round(float64(m.Sys)/(1<<20)*10) / 10
}

func cores() int { return runtime.GOMAXPROCS(0) }

// trimMetrics drops the lines of steps that keep does not want; a last line cut off in the middle goes too.
func trimMetrics(path string, keep func(stage string, step int64) bool) error {
	old, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	var kept bytes.Buffer
	sc := bufio.NewScanner(bytes.NewReader(old))
	sc.Buffer(nil, 64<<20)
	for sc.Scan() {
		var l struct {
			Stage string
			Step  int64
		}
		if json.Unmarshal(sc.Bytes(), &l) == nil && keep(l.Stage, l.Step) {
			kept.Write(sc.Bytes())
			kept.WriteByte('\n')
		}
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, kept.Bytes(), 0o644); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	return os.Rename(tmp, path)
}

// firstDifference names the first line in which two YAML texts differ, or "".
func firstDifference(a, b string) string {
	if a == b {
		return ""
	}
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(la), len(lb)) {
		var x, y string
		if i < len(la) {
			x = strings.TrimSpace(la[i])
		}
		if i < len(lb) {
			y = strings.TrimSpace(lb[i])
		}
		if x != y {
			return fmt.Sprintf("%q against %q", y, x)
		}
	}
	return "line endings"
}

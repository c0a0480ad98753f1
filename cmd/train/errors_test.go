package main

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write makes a file in a new directory and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestWrongUsage: wrong configurations, files and flags end with exit 2 and one clear line that names the setting or
// file, before any rank starts.
func TestWrongUsage(t *testing.T) {
	config := tinyConfig(t)
	out := filepath.Join(t.TempDir(), "run")
	launchWith := func(more ...string) []string {
		return append([]string{"launch", "-n", "4", "--config", config, "--out", out}, more...)
	}
	data := func(path string) []string {
		return launchWith("--set", "stages.0.data=[{path: "+path+"}]")
	}
	held := filepath.Join(t.TempDir(), "held")
	mustTrain(t, "launch", "--config", config, "--out", held, "--set", "stages.0.steps=1")
	truncated := write(t, "cut.txt.gz", "")
	{
		f, err := os.Create(truncated)
		if err != nil {
			t.Fatal(err)
		}
		z := gzip.NewWriter(f)
		z.Write([]byte(strings.Repeat("some text that is long enough ", 1000)))
		z.Close()
		st, _ := f.Stat()
		f.Truncate(st.Size() / 2)
		f.Close()
	}
	for name, c := range map[string]struct {
		args []string
		want []string // parts of the line
	}{
		"pipeline does not divide ranks": {launchWith("--set", "parallel.pipeline=3"), []string{"parallel.pipeline=3", "4"}},
		"expert does not divide data":    {launchWith("--set", "parallel.expert=3"), []string{"parallel.expert=3", "8"}},
		"experts not divisible":          {launchWith("--set", "parallel.expert=4", "--set", "model.moe.experts=6", "--set", "model.moe.groups=2", "--set", "model.moe.top_groups=1"), []string{"parallel.expert=4", "model.moe.experts=6"}},
		"groups do not divide experts":   {launchWith("--set", "model.moe.groups=3"), []string{"model.moe.groups=3", "model.moe.experts=8"}},
		"top-1 renormalised":             {launchWith("--set", "model.moe.top_k=1"), []string{"model.moe.top_k=1", "normalize"}},
		"unknown setting":                {launchWith("--set", "model.dims=3"), []string{"model.dims", "dim"}},
		"wrong type":                     {launchWith("--set", "stages.0.steps=many"), []string{"stages.0.steps", "many"}},
		"list index":                     {launchWith("--set", "stages.4.steps=3"), []string{"stages.4", "1"}},
		"not an assignment":              {launchWith("--set", "steps"), []string{"steps", "path=value"}},
		"odd rope":                       {launchWith("--set", "model.attention.rope=3"), []string{"model.attention.rope=3", "even"}},
		"recipe":                         {launchWith("--set", "precision.recipe=fp9"), []string{"precision.recipe=fp9", "fp32"}},
		"objective":                      {launchWith("--set", "stages.0.objective=ppo"), []string{"objective=ppo", "lm"}},
		"tokenizer":                      {launchWith("--set", "tokenizer.kind=bpe"), []string{"tokenizer.kind=bpe", "byte"}},
		"schedule":                       {launchWith("--set", "parallel.schedule=1f2b"), []string{"parallel.schedule=1f2b", "1f1b"}},
		"vocabulary":                     {launchWith("--set", "model.vocab=100"), []string{"model.vocab=100", "264"}},
		"more stages than layers":        {append([]string{"launch", "-n", "8", "--config", config, "--out", out}, "--set", "parallel.pipeline=8"), []string{"parallel.pipeline=8", "model.layers=4"}},
		"setting without effect":         {launchWith("--set", "stages.0.batch.end=6"), []string{"ramp_tokens"}},
		"no such preset":                 {[]string{"launch", "--config", "dmeo"}, []string{"dmeo", "demo"}},
		"no configuration":               {[]string{"launch", "-n", "4"}, []string{"--config"}},
		"syntax error":                   {[]string{"launch", "--config", write(t, "bad.yaml", "model:\n  dim: [3\n"), "--out", out}, []string{"bad.yaml:"}},
		"unknown key in a file":          {[]string{"launch", "--config", write(t, "key.yaml", "model:\n  dimm: 3\n"), "--out", out}, []string{"key.yaml:2:", "dimm", "dim"}},
		"duplicate key":                  {[]string{"launch", "--config", write(t, "twice.yaml", "model: {dim: 32}\nmodel: {dim: 64}\n"), "--out", out}, []string{"twice.yaml:2:"}},
		"empty configuration":            {[]string{"launch", "--config", write(t, "empty.yaml", ""), "--out", out}, []string{"empty.yaml", "empty"}},
		"no such file":                   {data("/nonexistent/corpus.txt"), []string{"stages.0.data.0.path", "/nonexistent/corpus.txt"}},
		"glob without match":             {data("/nonexistent/*.txt"), []string{"/nonexistent/*.txt"}},
		"empty corpus":                   {data(write(t, "none.txt", "")), []string{"none.txt", "no text"}},
		"bad lines":                      {data(write(t, "bad.jsonl", "{\"text\": \"x\"}\nnot json\n")), []string{"bad.jsonl:2", "max_bad_share"}},
		"wrong field":                    {data(write(t, "field.jsonl", "{\"body\": \"x\"}\n")), []string{"field.jsonl:1", "text"}},
		"cut-off gzip":                   {data(truncated), []string{"cut.txt.gz"}},
		"embedded name":                  {data("embedded:shakespear"), []string{"embedded:shakespear", "shakespeare"}},
		"ranks":                          {[]string{"launch", "-n", "0", "--config", config}, []string{"-n 0"}},
		"transport":                      {launchWith("--transport", "rdma"), []string{"--transport rdma", "shm", "tcp"}},
		"kernel":                         {launchWith("--kernel", "sse"), []string{"--kernel sse", "portable"}},
		"profile":                        {launchWith("--profile", "heat"), []string{"--profile heat", "cpu"}},
		"stage name":                     {launchWith("--stages", "tune"), []string{"--stages tune", "pretrain"}},
		"nodes without a rendezvous":     {launchWith("--nnodes", "2"), []string{"--nnodes 2", "--rendezvous"}},
		"node rank":                      {launchWith("--nnodes", "2", "--node-rank", "2"), []string{"--node-rank 2", "2"}},
		"unknown flag":                   {launchWith("--frobnicate"), []string{"frobnicate"}},
		"unknown command":                {[]string{"lunch"}, []string{"lunch", "launch"}},
		"a run is there":                 {[]string{"launch", "--config", config, "--out", held}, []string{held, "--resume", "--overwrite"}},
		"resume of nothing":              {[]string{"launch", "--out", filepath.Join(t.TempDir(), "nothing"), "--resume"}, []string{"--resume", "nothing"}},
		"out is a file":                  {[]string{"launch", "--config", config, "--out", write(t, "file", "x")}, []string{"file"}},
		"eval without checkpoint":        {[]string{"eval", "--data", "x"}, []string{"--checkpoint"}},
		"eval of nothing":                {[]string{"eval", "--checkpoint", "/nonexistent", "--data", "x"}, []string{"/nonexistent"}},
		"eval without data":              {[]string{"eval", "--checkpoint", held}, []string{"--data"}},
		"eval in an unknown recipe":      {[]string{"eval", "--checkpoint", held, "--data", "x", "--recipe", "fp4"}, []string{"--recipe fp4", "mxfp8"}},
		"keep of no recipe":              {[]string{"eval", "--checkpoint", held, "--data", "x", "--keep", "weights"}, []string{"--keep=weights", "fp32"}},
		"gradients of one batch":         {[]string{"eval", "--checkpoint", held, "--data", "x", "--recipe", "fp8", "--gradients", "1"}, []string{"--gradients 1"}},
		"gradients against themselves":   {[]string{"eval", "--checkpoint", held, "--data", "x", "--gradients", "4"}, []string{"--gradients 4", "--recipe"}},
		"eval of a missing file":         {[]string{"eval", "--checkpoint", held, "--data", "/nonexistent.txt"}, []string{"--data", "/nonexistent.txt"}},
		"temperature":                    {[]string{"generate", "--checkpoint", held, "--temperature=-1"}, []string{"temperature=-1"}},
		"inspect without argument":       {[]string{"inspect"}, []string{"--config"}},
		"inspect of an empty directory":  {[]string{"inspect", t.TempDir()}, []string{"no complete checkpoint"}},
		"schedule name":                  {[]string{"schedule", "zigzag"}, []string{"zigzag", "1f1b"}},
		"schedule file":                  {[]string{"schedule", "--file", write(t, "s.txt", "nonsense\n")}, []string{"s.txt"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, c.args...)
			text := strings.TrimSuffix(r.stderr, "\n")
			if r.code != exitUsage {
				t.Errorf("exit %d, want %d: %s", r.code, exitUsage, text)
			}
			if strings.Count(text, "\n") != 0 || !strings.HasPrefix(text, "train: ") {
				t.Errorf("want one line that begins with train:, got\n%s", text)
			}
			for _, w := range c.want {
				if !strings.Contains(text, w) {
					t.Errorf("%q does not name %q", text, w)
				}
			}
			if r.stdout != "" {
				t.Errorf("on stdout: %s", r.stdout)
			}
		})
	}
}

// TestAllErrorsAtOnce: several mistakes are told in one go, a line each.
func TestAllErrorsAtOnce(t *testing.T) {
	r := start(t, "launch", "-n", "4", "--config", tinyConfig(t), "--out", t.TempDir(), "--set", "parallel.pipeline=3", "--set", "model.attention.rope=3", "--set", "stages.0.rate.peak=-1")
	if r.code != exitUsage || strings.Count(r.stderr, "\n") != 3 {
		t.Errorf("exit %d, want %d with three lines:\n%s", r.code, exitUsage, r.stderr)
	}
}

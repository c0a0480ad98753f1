package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"moetor/data"
	"moetor/data/chat"
	"moetor/internal/train"
	"moetor/model"
)

// TestWilson: intervals as Newcombe (1998, Statistics in Medicine 17, table I, method 3) prints them.
func TestWilson(t *testing.T) {
	for _, c := range []struct {
		k, n int
		want [2]float64
	}{{81, 263, [2]float64{0.2553, 0.3662}}, {15, 148, [2]float64{0.0624, 0.1605}}, {0, 20, [2]float64{0, 0.1611}}, {1, 29, [2]float64{0.0061, 0.1718}}, {20, 20, [2]float64{0.8389, 1}}} {
		got := wilson(c.k, c.n)
		for i := range got {
			if math.Abs(got[i]-c.want[i]) > 5e-5 {
				t.Errorf("%d of %d: %.4f, want %.4f", c.k, c.n, got, c.want)
			}
		}
	}
}

// TestMatcher: what counts as the answer in a text, and which answers are equal.
func TestMatcher(t *testing.T) {
	for _, c := range []struct {
		pattern, text, answer string
		found                 string // "-": nothing
		equal                 bool
	}{
		{"", "She has 3 + 4 = 7 apples.", "7", "7", true},
		{"", "so 10-3 = 5-", "5.0", "5", true},
		{"", "that is 5-3", "3", "3", true},
		{"", "it is -3 degrees", "-3", "-3", true},
		{"", "it is \u22123 degrees", "-3", "-3", true},
		{"", "$1,234.50.", "1234.5", "1,234.50", true},
		{"", "1,2 and 3", "3", "3", true},
		{"", "about .5", "0.5", ".5", true},
		{"", "48/2=24", "2", "24", false},
		{"", "no idea", "7", "-", false},
		{"", "", "7", "-", false},
		{"", "  Paris ", "Paris", "Paris", true},
		{"", "paris", "Paris", "paris", false},
		{"", " ", "Paris", "-", false},
		{"", "Room 101", "Room 101", "Room 101", true},
		{`#### (\S+)`, "7\n#### 8", "8", "8", true},
		{`#### (\S+)`, "#### 7 #### 8", "7", "8", false},
		{`#### (\S+)`, "8", "8", "-", false},
		{`[A-D]\b`, "A or B", "B", "B", true},
		{`The answer is (\w+)`, "The answer is yes", "The answer is yes.", "yes", true},
	} {
		m := newMatcher(c.pattern)
		expected := m.expected(c.answer)
		got, found := m.find(c.text, expected)
		if !found {
			got = "-"
		}
		if got != c.found || (found && equalAnswers(got, expected)) != c.equal {
			t.Errorf("%q in %q: found %q, want %q, equal to %q: want %t", c.pattern, c.text, got, c.found, c.answer, c.equal)
		}
	}
	for _, c := range []struct {
		a, b string
		want bool
	}{{"1,000", "1000.0", true}, {"$5", "5.", true}, {"50%", "50", true}, {"5", "5.01", false}, {"inf", "Inf", false}, {"0x10", "16", false}, {"1e3", "1000", false}, {"a", "a ", true}, {"+4", "4", true}} {
		if equalAnswers(c.a, c.b) != c.want {
			t.Errorf("%q and %q: want %t", c.a, c.b, c.want)
		}
	}
}

// TestQuestions: each way of writing a row, and each wrong one with its file, line and reason.
func TestQuestions(t *testing.T) {
	for _, c := range []struct{ task, row, want string }{
		{taskExact, `{"question":"q","answer":"a b\n#### 1,234"}`, "q > 1,234"},
		{taskExact, `{"prompt":"q","answer":51.0,"equation":"( 76.0 - 25.0 )"}`, "q > 51"},
		{taskExact, `{"Body":"Dan had 3.","Question":"How many?","Answer":3}`, "Dan had 3. How many? > 3"},
		{taskExact, `{"query":"q","answer":"Paris"}`, "q > Paris"},
		{taskExact, `{"question":"","answer":"x"}`, " > x"},
		{taskExact, `{"question":null,"prompt":"p","answer":0.25}`, "p > 0.25"},
		{taskExact, `{"question":"q"}`, `no field "answer"`},
		{taskExact, `{"answer":"q"}`, `no field "question", "prompt" or "query"`},
		{taskExact, `{"question":["q"],"answer":1}`, `field "question" is not a string`},
		{taskExact, `{"question":"q","answer":true}`, `field "answer" is neither a string nor a number`},
		{taskExact, `{"question":"q","answer":"#### "}`, `field "answer" is empty`},
		{taskExact, `{"question":"q","body":3,"answer":"1"}`, `field "body" is not a string`},
		{taskExact, `[1]`, "not a JSON object"},
		{taskExact, `null`, "not a JSON object"},
		{taskExact, `{"question":`, "not a JSON object"},
		{taskExact, `{"question":"\ud800","answer":1}`, "has half a surrogate pair"},
		{taskExact, "{\"question\":\"\xff\",\"answer\":1}", "not valid UTF-8"},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":1}`, "q > y"},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":"y"}`, "q > y"},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":"b"}`, "q > y"},
		{taskChoice, `{"question":"q","choices":["b","a"],"answer":"b"}`, "q > b"},
		{taskChoice, `{"question":"q","choices":{"text":["2","1"],"label":["1","2"]},"answerKey":"1"}`, "q > 2"},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":2}`, `field "answer" is 2, and there are 2 choices`},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":-1}`, `field "answer" is -1`},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":"1"}`, `field "answer" is "1", which is no choice`},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":"C"}`, `field "answer" is "C", which is no choice`},
		{taskChoice, `{"question":"q","choices":["x","y"],"answer":1.5}`, `field "answer" is neither an index nor a string`},
		{taskChoice, `{"question":"q","choices":["x","y"]}`, `no field "answer"`},
		{taskChoice, `{"question":"q","choices":["x"],"answer":0}`, `field "choices" has 1, want at least 2`},
		{taskChoice, `{"question":"q","choices":["x",""],"answer":0}`, `choice 1 is empty`},
		{taskChoice, `{"question":"q","choices":{"text":["x","y"],"label":["1"]},"answer":0}`, `field "choices" has 2 texts and 1 labels`},
		{taskChoice, `{"question":"q","choices":"xy","answer":0}`, `field "choices" is not a list of strings`},
		{taskChoice, `{"question":"q","answer":0}`, `no field "choices"`},
	} {
		path := write(t, "rows.jsonl", "\n"+c.row+"\n")
		rows, _, err := readQuestions(t.Context(), path, c.task, 0)
		var got string
		if err != nil {
			got = err.Error()
			if want := path + ":2"; !strings.Contains(got, want) {
				t.Errorf("%s: %q does not name %s", c.row, got, want)
			}
		} else if q := rows[0]; c.task == taskChoice {
			got = q.text + " > " + q.choices[q.right]
		} else {
			got = q.text + " > " + q.answer
		}
		if !strings.Contains(got, c.want) || err == nil && got != c.want {
			t.Errorf("%s %s: %q, want %q", c.task, c.row, got, c.want)
		}
	}
	if _, _, err := readQuestions(t.Context(), write(t, "none.jsonl", "\n\n"), taskExact, 0); err == nil || !strings.Contains(err.Error(), "no rows") {
		t.Errorf("a file without rows: %v", err)
	}
}

// TestQuestionFiles: compressed files and globs are read as plain ones; one bad row in a hundred is left out and named, and
// two are refused.
func TestQuestionFiles(t *testing.T) {
	var text bytes.Buffer
	for i := range 99 {
		fmt.Fprintf(&text, "{\"question\":\"q%d\",\"answer\":%d}\n", i, i)
	}
	text.WriteString("{\"question\":\"bad\"}\n")
	dir := t.TempDir()
	put := func(name string, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("a.jsonl", text.Bytes())
	var gz bytes.Buffer
	z := gzip.NewWriter(&gz)
	z.Write(text.Bytes())
	z.Close()
	put("b.jsonl.gz", gz.Bytes())
	e, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	put("c.jsonl.zst", e.EncodeAll(text.Bytes(), nil))
	for pattern, want := range map[string]int{"a.jsonl": 99, "b.jsonl.gz": 99, "c.jsonl.zst": 99, "*.jsonl*": 297} {
		rows, bad, err := readQuestions(t.Context(), filepath.Join(dir, pattern), taskExact, 0)
		if err != nil || len(rows) != want || len(bad) != want/99 {
			t.Errorf("%s: %d rows, %d bad, %v; want %d and %d", pattern, len(rows), len(bad), err, want, want/99)
			continue
		}
		if last := rows[98]; last.text != "q98" || last.answer != "98" || last.line != 99 || bad[0].Line != 100 {
			t.Errorf("%s: row %+v, bad %+v", pattern, last, bad[0])
		}
	}
	if rows, bad, err := readQuestions(t.Context(), filepath.Join(dir, "*.jsonl*"), taskExact, 120); err != nil || len(rows) != 120 || len(bad) != 1 {
		t.Errorf("the first 120 rows: %d rows, %d bad, %v", len(rows), len(bad), err)
	}
	put("a.jsonl", append(text.Bytes(), "x\n"...))
	_, _, err = readQuestions(t.Context(), filepath.Join(dir, "a.jsonl"), taskExact, 0)
	if want := fmt.Sprintf("2 of 101 rows are bad; first: %s:100", filepath.Join(dir, "a.jsonl")); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("two bad rows in 101: %v, want %q", err, want)
	}
}

// words are what the model of TestEvalTasks learns: "three is 3.".
var words = []string{"two", "three", "four", "five", "six", "seven", "eight"}

// wordModel trains a model on words by heart and returns its run directory.
func wordModel(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for i := range 4000 {
		k := i * i * 7919 % 7
		if i%2 == 1 {
			k = i / 2 % 7
		}
		fmt.Fprintf(&text, "%s is %d.\n", words[k], k+2)
	}
	config := write(t, "words.yaml", `
run: {eval_every: 0}
model:
  dim: 32
  layers: 2
  dense_layers: 1
  dense_inter: 64
  init_std: 0.02
  context: 32
  attention: {heads: 2, q_lora: 16, kv_lora: 16, nope: 8, rope: 4, v: 8}
  moe: {experts: 4, top_k: 2, shared: 1, inter: 16, groups: 1, top_groups: 1, scale: 1.5, seq_aux: 0.001}
  mtp: {depth: 0}
parallel: {microbatch: 8}
checkpoint: {every: 0, keep: 1}
stages:
  - name: pretrain
    objective: lm
    data: [{path: `+write(t, "words.txt", text.String())+`}]
    steps: 250
    batch: {start: 16}
    rate: {peak: 1.0e-2, warmup_steps: 10}
`)
	dir := filepath.Join(t.TempDir(), "words")
	mustTrain(t, "launch", "--config", config, "--out", dir)
	return dir
}

// evaluate runs eval and returns what it prints as JSON.
func evaluate(t *testing.T, args ...string) (r taskResult) {
	t.Helper()
	out, errs, code := inProcess(append([]string{"eval", "--json", "--threads", "1"}, args...)...)
	if code != exitDone {
		t.Fatalf("eval %s: exit %d\n%s", strings.Join(args, " "), code, errs)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r
}

// inProcess runs a command line here, without a process of its own.
func inProcess(args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = run(args, &out, &errs)
	return out.String(), errs.String(), code
}

// logProb is the log-probability of the last n of ids after the others, from the logits of a whole sequence.
func logProb(t *testing.T, m *train.Model, ids []int32, n int) (sum float64) {
	t.Helper()
	d, err := model.NewDecoder(m.Chunk)
	if err != nil {
		t.Fatal(err)
	}
	logits, err := d.Logits(ids[:len(ids)-1])
	if err != nil {
		t.Fatal(err)
	}
	for i := len(ids) - n; i < len(ids); i++ {
		var z float64
		for _, v := range logits.Row(i - 1) {
			z += math.Exp(float64(v))
		}
		sum += float64(logits.Row(i - 1)[ids[i]]) - math.Log(z)
	}
	return sum
}

// TestEvalTasks: a model that knows its words by heart chooses and says them, and every score is that of the logits.
func TestEvalTasks(t *testing.T) {
	dir := wordModel(t)
	m, err := train.LoadModel(dir, model.Recipe{})
	if err != nil {
		t.Fatal(err)
	}
	tok := m.Tokenizer
	var exact, choice strings.Builder
	choices := []string{"2.", "3.", "4.", "5.", "6.", "7.", "8.", "8.\neight is 8."}
	list, _ := json.Marshal(choices)
	for i, w := range words {
		fmt.Fprintf(&exact, "{\"question\": \"%s is\", \"answer\": \"so\\n#### %d\"}\n", w, i+2)
		fmt.Fprintf(&choice, "{\"question\": \"%s is\", \"choices\": %s, \"answer\": %d}\n", w, list, i)
	}
	fmt.Fprintf(&choice, "{\"question\": \"%s three is\", \"choices\": %s, \"answer\": \"B\"}\n", strings.Repeat("eight is 8.\\n", 9), list)
	exactFile, choiceFile := write(t, "exact.jsonl", exact.String()), write(t, "choice.jsonl", choice.String())
	rows, _, err := readQuestions(t.Context(), choiceFile, taskChoice, 0)
	if err != nil {
		t.Fatal(err)
	}

	t.Run("choice", func(t *testing.T) {
		for _, through := range []string{"", "builtin"} {
			// What the scores must be, choice by choice, and the accuracies that follow.
			var right, rightNorm int
			var taken []string
			for _, q := range rows {
				best, bestNorm, score, norm := 0, 0, math.Inf(-1), math.Inf(-1)
				for i, c := range q.choices {
					ids := append(tok.Encode(q.text+" "), tok.Encode(c)...)
					n := len(c) + 1 // the space before it is part of the answer; the tokenizer is of bytes
					if through != "" {
						special := func(name string) int32 {
							id, ok := tok.SpecialID(name)
							if !ok {
								t.Fatalf("no token %s", name)
							}
							return id
						}
						tmpl, err := chat.OpenTemplate(through)
						if err != nil {
							t.Fatal(err)
						}
						pieces, err := tmpl.Render([]chat.Message{{Role: "user", Content: q.text}}, true)
						if err != nil {
							t.Fatal(err)
						}
						if ids, _, _, err = chat.Encode(tok, pieces); err != nil {
							t.Fatal(err)
						}
						ids = append(append(ids, tok.Encode(c)...), special(data.TokenEnd))
					}
					if over := len(ids) - 1 - m.Run.Model.Context; over > 0 {
						ids = ids[over:]
					}
					s := logProb(t, m, ids, n)
					if s > score {
						best, score = i, s
					}
					if s/float64(n) > norm {
						bestNorm, norm = i, s/float64(n)
					}
				}
				taken = append(taken, q.choices[best])
				if best == q.right {
					right++
				}
				if bestNorm == q.right {
					rightNorm++
				}
			}
			if through == "" && right < 6 {
				t.Errorf("the model has learned %d of %d rows: nothing to see", right, len(rows))
			}
			var first taskResult
			for i, batch := range []string{"1", "3", "100"} {
				args := []string{"--checkpoint", dir, "--data", choiceFile, "--task", "choice", "--batch", batch, "--show", "100"}
				if through != "" {
					args = append(args, "--chat", "--template", through)
				}
				r := evaluate(t, args...)
				if i == 0 {
					first = r
				} else if !reflect.DeepEqual(r, first) {
					t.Errorf("--batch %s: %+v, with 1 %+v", batch, r, first)
				}
				for k, s := range r.Samples {
					if s.Text != taken[k] || s.Expected != rows[k].choices[rows[k].right] || s.Correct != (s.Text == s.Expected) || s.Row != int64(k+1) {
						t.Errorf("template %q: sample %+v, want %q", through, s, taken[k])
					}
				}
				if n := float64(len(rows)); r.Accuracy != float64(right)/n || *r.AccuracyNorm != float64(rightNorm)/n || r.CI95 != wilson(right, len(rows)) ||
					*r.CI95Norm != wilson(rightNorm, len(rows)) || r.Rows != len(rows) || len(r.Samples) != len(rows) {
					t.Errorf("template %q: %+v, want %d right, %d by token", through, r, right, rightNorm)
				}
			}
			if through == "" && first.Truncated != 1 {
				t.Errorf("%d rows truncated, want 1", first.Truncated)
			}
		}
	})
	t.Run("exact", func(t *testing.T) {
		short := evaluate(t, "--checkpoint", dir, "--data", exactFile, "--task", "exact", "--max-tokens", "3", "--show", "2")
		right, rightOf3 := 0, 0
		for i, w := range words { // what generate says
			var g generation
			out, errs, _ := inProcess("generate", "--checkpoint", dir, "--prompt", w+" is", "--temperature", "0", "--tokens", "3", "--json")
			if err := json.Unmarshal([]byte(out), &g); err != nil {
				t.Fatalf("%v: %s%s", err, out, errs)
			}
			if g.Text == fmt.Sprintf(" %d.", i+2) {
				right++
				if i < 3 {
					rightOf3++
				}
			}
			if i < 2 && short.Samples[i].Text != g.Text {
				t.Errorf("%q is answered by %q, generate says %q", w, short.Samples[i].Text, g.Text)
			}
		}
		if want := float64(right) / float64(len(words)); right < 5 || short.Accuracy != want || short.CI95 != wilson(right, len(words)) || *short.Unfinished != len(words) || len(short.Samples) != 2 {
			t.Errorf("%+v, want accuracy %v", short, want)
		}
		first := evaluate(t, "--checkpoint", dir, "--data", exactFile, "--task", "exact", "--pattern", `^ (\d)\.`, "--max-tokens", "20", "--limit", "3")
		if first.Rows != 3 || first.Accuracy != float64(rightOf3)/3 {
			t.Errorf("with a pattern for the first number of a long answer: %+v, want %d right", first, rightOf3)
		}
		none := evaluate(t, "--checkpoint", dir, "--data", exactFile, "--task", "exact", "--pattern", "no such thing", "--max-tokens", "4")
		if none.Accuracy != 0 || *none.NoAnswer != len(words) {
			t.Errorf("a pattern that matches nothing: %+v", none)
		}
		asked := evaluate(t, "--checkpoint", dir, "--data", exactFile, "--task", "exact", "--chat", "--max-tokens", "4", "--format", `three is 3.\n{question}`, "--show", "1")
		if want := "three is 3.\ntwo is"; asked.Samples[0].Prompt != want || asked.Rows != len(words) {
			t.Errorf("prompt %q, want %q", asked.Samples[0].Prompt, want)
		}
		text, _, _ := inProcess("eval", "--checkpoint", dir, "--data", exactFile, "--task", "exact", "--max-tokens", "3")
		if want := fmt.Sprintf("accuracy %.4f  95 %% interval", short.Accuracy); !strings.HasPrefix(text, want) {
			t.Errorf("%q, want %q", text, want)
		}
	})
	t.Run("refused", func(t *testing.T) {
		long := write(t, "long.jsonl", `{"question": "q", "choices": ["a", "`+strings.Repeat("b", 40)+`"], "answer": 0}`)
		bad := write(t, "bad.jsonl", "{\"question\": \"q\", \"answer\": 1}\n{\"question\": \"q\"}\n")
		for name, c := range map[string]struct{ args, want []string }{
			"task":                {[]string{"--task", "exakt"}, []string{"--task exakt", "exact"}},
			"chat of perplexity":  {[]string{"--chat"}, []string{"--chat", "perplexity"}},
			"pattern of choice":   {[]string{"--task", "choice", "--pattern", "x"}, []string{"--pattern", "choice"}},
			"field of exact":      {[]string{"--task", "exact", "--field", "x"}, []string{"--field", "exact"}},
			"batch of exact":      {[]string{"--task", "exact", "--batch", "2"}, []string{"--batch", "exact"}},
			"template alone":      {[]string{"--task", "exact", "--template", "chatml"}, []string{"--template chatml", "--chat"}},
			"unknown template":    {[]string{"--task", "exact", "--data", exactFile, "--chat", "--template", "/nonexistent.json"}, []string{"--template /nonexistent.json"}},
			"pattern":             {[]string{"--task", "exact", "--pattern", "("}, []string{"--pattern", "missing closing )"}},
			"format":              {[]string{"--task", "exact", "--format", "Q:"}, []string{"--format", "{question}"}},
			"max tokens":          {[]string{"--task", "exact", "--max-tokens", "0"}, []string{"--max-tokens 0"}},
			"limit":               {[]string{"--task", "exact", "--limit=-1"}, []string{"--limit -1"}},
			"show":                {[]string{"--task", "choice", "--show=-1"}, []string{"--show -1"}},
			"bad row":             {[]string{"--task", "exact", "--data", bad}, []string{"bad.jsonl:2", `no field "answer"`, "1 of 2"}},
			"choice beyond model": {[]string{"--task", "choice", "--data", long}, []string{"long.jsonl:1", "choice 1", "41", "model.context=32"}},
			"no file":             {[]string{"--task", "choice", "--data", "/nonexistent.jsonl"}, []string{"--data", "/nonexistent.jsonl"}},
		} {
			stdout, stderr, code := inProcess(append([]string{"eval", "--checkpoint", dir}, c.args...)...)
			if code != exitUsage || strings.Count(stderr, "\n") != 1 || stdout != "" {
				t.Errorf("%s: exit %d, want %d with one line:\n%s%s", name, code, exitUsage, stderr, stdout)
			}
			for _, w := range c.want {
				if !strings.Contains(stderr, w) {
					t.Errorf("%s: %q does not name %q", name, stderr, w)
				}
			}
		}
	})
}

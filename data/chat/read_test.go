package chat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"moetor/data"
)

func writeFile(t testing.TB, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// readAll reads a source that may be all bad.
func readAll(t testing.TB, path string, want ...Shape) ([]Example, ReadReport, error) {
	t.Helper()
	share := 1.0
	var list []Example
	report, err := ReadShapes(t.Context(), data.SourceConfig{Path: path, MaxBadShare: &share}, "--data", want, func(e Example) error {
		list = append(list, e)
		return nil
	})
	return list, report, err
}

func u(s string) Message { return Message{User, s} }
func a(s string) Message { return Message{Assistant, s} }

func TestShapes(t *testing.T) {
	for _, c := range []struct {
		row   string
		shape Shape
		want  Example
	}{
		{`{"messages":[{"role":"system","content":"s"},{"role":"user","content":"q"},{"role":"assistant","content":"a"},{"role":"tool","content":"t"},{"role":"assistant","content":"b"}]}`,
			Messages, Example{Messages: []Message{{System, "s"}, u("q"), a("a"), {Tool, "t"}, a("b")}}},
		{`{"messages":[{"role":"assistant","content":"first"},{"role":"user","content":"q"}],"source":1}`, // as in Taskmaster
			Messages, Example{Messages: []Message{a("first"), u("q")}}},
		{`{"prompt":"q","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"completion":null}`,
			Messages, Example{Messages: []Message{u("q"), a("a")}}},
		{`{"prompt":"q","completion":"a"}`, PromptCompletion, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}}},
		{`{"prompt":[],"completion":"a"}`, PromptCompletion, Example{Prompt: []Message{}, Completion: []Message{a("a")}}},
		{`{"prompt":[{"role":"user","content":"q"}],"completion":[{"role":"assistant","content":"a"},{"role":"tool","content":"t"},{"role":"assistant","content":"b"}],"label":null}`,
			PromptCompletion, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a"), {Tool, "t"}, a("b")}}},
		{`{"conversations":[{"from":"human","value":"q"},{"from":"gpt","value":"a"}],"system":"s"}`,
			ShareGPT, Example{Messages: []Message{{System, "s"}, u("q"), a("a")}}},
		{`{"conversations":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}],"system":""}`,
			ShareGPT, Example{Messages: []Message{u("q"), a("a")}}},
		{`{"instruction":"do","input":"this","output":"done"}`, Alpaca, Example{Messages: []Message{u("do\n\nthis"), a("done")}}},
		{`{"instruction":"do","input":"","output":"done","history":[["h","i"]],"system":"s"}`,
			Alpaca, Example{Messages: []Message{{System, "s"}, u("h"), a("i"), u("do"), a("done")}}},
		{`{"prompt":"q","chosen":"good","rejected":"bad"}`,
			PreferenceExplicit, Example{Prompt: []Message{u("q")}, Chosen: []Message{a("good")}, Rejected: []Message{a("bad")}}},
		{`{"prompt":[{"role":"assistant","content":"hi"},{"role":"user","content":"q"}],"chosen":[{"role":"assistant","content":"good"}],"rejected":{"role":"assistant","content":"bad"},"messages":[]}`,
			PreferenceExplicit, Example{Prompt: []Message{a("hi"), u("q")}, Chosen: []Message{a("good")}, Rejected: []Message{a("bad")}}},
		// The prompt again in whole conversations, with a system message before it, as in UltraFeedback's binarised form.
		{`{"prompt":"q","chosen":[{"role":"system","content":"s"},{"role":"user","content":"q"},{"role":"assistant","content":"good"}],"rejected":[{"role":"system","content":"s"},{"role":"user","content":"q"},{"role":"assistant","content":"bad"}]}`,
			PreferenceExplicit, Example{Prompt: []Message{{System, "s"}, u("q")}, Chosen: []Message{a("good")}, Rejected: []Message{a("bad")}}},
		{`{"chosen":[{"role":"user","content":"q"},{"role":"assistant","content":"a"},{"role":"user","content":"r"},{"role":"assistant","content":"good"}],"rejected":[{"role":"user","content":"q"},{"role":"assistant","content":"a"},{"role":"user","content":"r"},{"role":"assistant","content":"bad"}]}`,
			PreferenceImplicit, Example{Prompt: []Message{u("q"), a("a"), u("r")}, Chosen: []Message{a("good")}, Rejected: []Message{a("bad")}}},
		{`{"prompt":"q","completion":"a","label":true}`, Unpaired, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}, Label: true}},
		{`{"prompt":"q","completion":{"role":"assistant","content":"a"},"reward":1.0}`, Unpaired, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}, Label: true}},
		{`{"prompt":"q","completion":"a","reward":0}`, Unpaired, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}}},
		{`{"prompt":"q","completion":"a","label":0.5,"reward":9}`, Unpaired, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}}},
		{`{"prompt":"q","completion":"a","label":0.51}`, Unpaired, Example{Prompt: []Message{u("q")}, Completion: []Message{a("a")}, Label: true}},
	} {
		path := writeFile(t, "a.jsonl", []byte("\ufeff\n"+c.row+"\n"))
		list, report, err := readAll(t, path)
		if err != nil || len(list) != 1 {
			t.Errorf("%s: %v, %v", c.row, err, report.BadRows)
			continue
		}
		c.want.File, c.want.Line = path, 2
		if report.Shape != c.shape || !reflect.DeepEqual(list[0], c.want) {
			t.Errorf("%s is read as %v %+v", c.row, report.Shape, list[0])
		}
	}
}

func TestBadRows(t *testing.T) {
	m := func(turns string) string { return `{"messages":[` + turns + `]}` }
	const q, ans = `{"role":"user","content":"q"}`, `{"role":"assistant","content":"a"}`
	for row, want := range map[string]string{
		`{"messages":`:                          "not JSON: ",
		`{"messages":"` + "\xff" + `"}`:         "not valid UTF-8",
		`null`:                                  "not a JSON object",
		`3`:                                     "not a JSON object",
		`{"text":"x","id":1}`:                   "has the fields [id text], want one of: preference (prompt, chosen, rejected);",
		`{"messages":null}`:                     "has the fields [messages]",
		m(``):                                   "no turn of the assistant",
		m(q):                                    "no turn of the assistant",
		m(q + `,{"role":"boss","content":"x"}`): `messages: turn 2 has the unknown role "boss", want system, user, assistant or tool`,
		m(q + `,{"role":"Assistant","content":"x"}`):                                `unknown role "Assistant"`,
		m(q + `,{"role":"assistant","content":" \n"}`):                              "turn 2 is an empty answer",
		m(q + `,{"role":"assistant","content":null}`):                               "messages: turn 2 has no content",
		m(q + `,{"role":"assistant"}`):                                              "messages: turn 2 has no content",
		m(q + `,{"role":"assistant","content":[{"type":"text","text":"x"}]}`):       "turn 2 has a list as its content, want a string",
		m(q + `,{"role":"assistant","content":7}`):                                  "turn 2 has a number as its content",
		m(q + `,{"content":"x"}`):                                                   "turn 2 has no role",
		m(q + `,{"role":1,"content":"x"}`):                                          "turn 2 has a number as its role",
		m(q + `,"x"`):                                                               "turn 2 is a string, want a message",
		m(q + `,{"role":"assistant","content":"x","tool_calls":[{}]}`):              "turn 2 has tool_calls",
		m(`{"role":"system","content":"x"},{"role":"system","content":"y"},` + ans): "turn 2 is a system message, which must be the first",
		m(q + `,{"role":"system","content":"x"},` + ans):                            "turn 2 is a system message",
		m(q + `,{"role":"assistant","content":"\ud800"}`):                           "half a surrogate pair",
		`{"messages":"hello"}`:                                                      `field "messages" is a string, want a list of messages`,
		`{"messages":5}`:                                                            `field "messages" is a number`,
		`{"prompt":"q","completion":""}`:                                            "completion: turn 2 is an empty answer",
		`{"prompt":"q","completion":[]}`:                                            "completion has no answer",
		`{"prompt":"q","completion":[` + q + `,` + ans + `]}`:                       "completion begins or ends with a turn of the role user",
		`{"prompt":"q","completion":[` + ans + `,` + q + `]}`:                       "completion begins or ends with a turn of the role user",
		`{"prompt":"q","completion":"a","label":"yes"}`:                             `field "label" is a string, want true, false or a number`,
		`{"prompt":"q","chosen":"a","rejected":"a"}`:                                "chosen and rejected are the same",
		`{"prompt":"q","chosen":"a","rejected":" "}`:                                "rejected: turn 2 is an empty answer",
		`{"prompt":"p","chosen":[` + q + `,` + ans + `],"rejected":[` + q + `]}`:    "do not begin with the prompt",
		`{"chosen":"a","rejected":"b"}`:                                             `field "chosen" is a string`,
		`{"chosen":[` + ans + `],"rejected":[{"role":"assistant","content":"b"}]}`:  "do not begin with the same turn",
		`{"chosen":[` + q + `,` + ans + `],"rejected":[` + q + `]}`:                 "rejected has no answer",
		`{"chosen":[` + q + `,` + ans + `],"rejected":[` + q + `,` + ans + `]}`:     "chosen has no answer",
		`{"instruction":1,"output":"x"}`:                                            `field "instruction" is a number`,
		`{"instruction":"x","output":"y","history":[["a"],3]}`:                      `"history" is not a list of pairs`,
		`{"conversations":[{"from":"human","value":"x"},{"from":"gpt"}]}`:           "conversations: turn 2 has no value",
	} {
		path := writeFile(t, "bad.jsonl", []byte("\n"+row+"\n"))
		_, report, err := readAll(t, path)
		if len(report.BadRows) != 1 || report.Bad != 1 || report.Rows != 1 || report.BadRows[0].Line != 2 || report.BadRows[0].File != path ||
			!strings.Contains(report.BadRows[0].Reason, want) {
			t.Errorf("%s: bad rows %v, want %q", row, report.BadRows, want)
		}
		if err == nil || !strings.HasSuffix(err.Error(), "holds no conversations") {
			t.Errorf("%s: error %v", row, err)
		}
	}
}

const goodRow = `{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}`

func TestBadShare(t *testing.T) {
	rows := strings.Repeat(goodRow+"\n", 99)
	path := writeFile(t, "rows.jsonl", []byte(rows+`{"prompt":"q","completion":"a"}`+"\n"))
	n := 0
	count := func(Example) error { n++; return nil }
	report, err := Read(t.Context(), data.SourceConfig{Path: path}, "stages.1.data.0", count)
	if err != nil || n != 99 || report.Bad != 1 || report.BadRows[0].Reason != "is prompt and completion, but the first row is messages" {
		t.Errorf("%d rows, %+v, %v", n, report, err)
	}
	path = writeFile(t, "rows.jsonl", []byte(rows+"{}\n{}\n"))
	_, err = Read(t.Context(), data.SourceConfig{Path: path}, "stages.1.data.0", count)
	want := fmt.Sprintf("stages.1.data.0.path=%s: 2 of 101 rows are bad, above max_bad_share=0.01; first: %s:100: has the fields []", path, path)
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("error %v\nwant  %s", err, want)
	}
	// The caller can find a row bad too, and its own errors end the reading.
	report, err = Read(t.Context(), data.SourceConfig{Path: path, MaxBadShare: new(0.05)}, "--data", func(e Example) error {
		if e.Line == 7 {
			return fmt.Errorf("wrapped: %w", BadRow{"too odd"})
		}
		return nil
	})
	if err != nil || report.Bad != 3 || report.BadRows[0].String() != path+":7: too odd" {
		t.Errorf("%+v, %v", report, err)
	}
	stop := errors.New("stop")
	if _, err = Read(t.Context(), data.SourceConfig{Path: path}, "--data", func(Example) error { return stop }); err != stop {
		t.Errorf("error %v", err)
	}
}

func TestShapesWanted(t *testing.T) {
	path := writeFile(t, "x.jsonl", []byte(`{"prompt":"q","chosen":"a","rejected":"b","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}`))
	for want, shape := range map[Shape]Shape{Messages: Messages, PreferenceExplicit: PreferenceExplicit} {
		if _, report, err := readAll(t, path, want); err != nil || report.Shape != shape {
			t.Errorf("wanted %v: %v, %v", want, report.Shape, err)
		}
	}
	_, report, _ := readAll(t, path, Unpaired, ShareGPT)
	if want := "is preference (prompt, chosen, rejected), want one of: unpaired preference (prompt, completion, label); ShareGPT conversations"; report.BadRows[0].Reason != want {
		t.Errorf("bad row: %s", report.BadRows[0].Reason)
	}
}

func TestNotes(t *testing.T) {
	path := writeFile(t, "x.jsonl", []byte(`{"conversations":[{"from":"human","value":"a"},{"from":"human","value":""},{"from":"gpt","value":"c"}]}
{"conversations":[{"from":"human","value":"a"},{"from":"model","value":"c"},{"from":"human","value":"c"}]}
{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":""}]}
`))
	_, report, err := readAll(t, path)
	want := []string{`role "gpt" is read as assistant (1 turns)`, `role "human" is read as user (4 turns)`, `role "model" is read as assistant (1 turns)`,
		"1 rows have two turns of one role in a row", "1 conversations do not end with an answer of the assistant", "1 turns other than answers are empty"}
	if err != nil || !slices.Equal(report.Notes, want) {
		t.Errorf("notes %q, %v", report.Notes, err)
	}
}

// One source in every container gives the same examples and the same digest.
func TestContainers(t *testing.T) {
	lines := []byte(goodRow + "\r\n\n" + `{"messages":[{"role":"user","content":"é\u00e9"},{"role":"assistant","content":"漢"}]}`)
	array := []byte("\ufeff [\n" + strings.Join(strings.Split(strings.ReplaceAll(string(lines), "\r\n\n", "\n"), "\n"), ",\n") + "]\n")
	gz := func(b []byte) []byte {
		var out bytes.Buffer
		w := gzip.NewWriter(&out)
		w.Write(b)
		w.Close()
		return out.Bytes()
	}
	zst := func(b []byte) []byte {
		w, _ := zstd.NewWriter(nil)
		return w.EncodeAll(b, nil)
	}
	type turn struct {
		Role    string `parquet:"role"`
		Content string `parquet:"content"`
	}
	type row struct {
		Messages []turn `parquet:"messages,list"`
	}
	var pq bytes.Buffer
	if err := parquet.Write(&pq, []row{{[]turn{{"user", "q"}, {"assistant", "a"}}}, {[]turn{{"user", "éé"}, {"assistant", "漢"}}}}); err != nil {
		t.Fatal(err)
	}
	var bare bytes.Buffer // a repeated group without the list's wrapping
	type bareRow struct {
		Messages []turn `parquet:"messages"`
	}
	if err := parquet.Write(&bare, []bareRow{{[]turn{{"user", "q"}, {"assistant", "a"}}}, {[]turn{{"user", "éé"}, {"assistant", "漢"}}}}); err != nil {
		t.Fatal(err)
	}
	digest := ""
	for name, content := range map[string][]byte{
		"a.jsonl": lines, "a.jsonl.gz": gz(lines), "a.jsonl.zst": zst(lines), "a.json": array, "a.json.gz": gz(array),
		"a.parquet": pq.Bytes(), "a.parquet.gz": gz(pq.Bytes()), "a.parquet.zst": zst(pq.Bytes()), "bare.parquet": bare.Bytes(), "noname": zst(lines),
	} {
		list, report, err := readAll(t, writeFile(t, name, content))
		if err != nil || len(list) != 2 || !slices.Equal(list[1].Messages, []Message{u("éé"), a("漢")}) {
			t.Errorf("%s: %+v, %v, %v", name, list, report.BadRows, err)
			continue
		}
		if digest == "" {
			digest = report.Digest
		}
		if report.Digest != digest || len(digest) != 64 {
			t.Errorf("%s: digest %s, want %s", name, report.Digest, digest)
		}
	}
	_, report, _ := readAll(t, writeFile(t, "b.jsonl", []byte(goodRow)))
	if report.Digest == digest {
		t.Error("another source has the same digest")
	}
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"cut.jsonl.gz":  {gz(bytes.Repeat(lines, 100))[:60], "cut off"},
		"cut.json":      {array[:len(array)-20], "element 2 of the JSON array: not JSON"},
		"open.json":     {[]byte("[" + goodRow), "element 2 of the JSON array: not JSON"},
		"more.json":     {append(slices.Clone(array), array...), "data after the end of the JSON array"},
		"cut.parquet":   {pq.Bytes()[:len(pq.Bytes())-9], "not readable as Parquet"},
		"short.parquet": {[]byte("PAR1"), "not readable as Parquet"},
		"empty.jsonl":   {nil, "holds no conversations"},
		"named.zst":     {lines, "named .zst but is not zstd data"},
	} {
		path := writeFile(t, name, c.content)
		if _, _, err := readAll(t, path); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
}

// The files in testdata are DuckDB's.
func TestForeignParquet(t *testing.T) {
	list, report, err := readAll(t, "testdata/messages.parquet")
	if err != nil || report.Shape != Messages || report.Rows != 5 || len(list) != 2 ||
		!slices.Equal(list[0].Messages, []Message{u("Hi é 漢"), a("Hello")}) ||
		!slices.Equal(list[1].Messages, []Message{u(""), a("<|end|>"), u("u"), a("a")}) || list[1].Line != 2 {
		t.Errorf("%+v, %+v, %v", list, report, err)
	}
	var reasons []string
	for _, b := range report.BadRows {
		reasons = append(reasons, fmt.Sprint(b.Line, " ", b.Reason))
	}
	if len(reasons) != 3 || reasons[0] != "3 messages: turn 1 has no content" || reasons[1] != "4 no turn of the assistant" || !strings.HasPrefix(reasons[2], "5 has the fields []") {
		t.Errorf("bad rows %q", reasons)
	}
	list, report, err = readAll(t, "testdata/pairs.parquet")
	if err != nil || report.Shape != PreferenceExplicit || len(list) != 2 || list[0].Prompt[0] != u("q1") || list[0].Rejected[0] != a("bad") ||
		list[1].Prompt[0] != u("plain [not json") || list[1].Chosen[0] != a("yes") {
		t.Errorf("%+v, %+v, %v", list, report, err)
	}
	for _, name := range []string{"labels", "rewards"} {
		list, report, err = readAll(t, "testdata/"+name+".parquet")
		if err != nil || report.Shape != Unpaired || len(list) != 2 || !list[0].Label || list[1].Label || list[1].Completion[0] != a("c2") {
			t.Errorf("%s: %+v, %+v, %v", name, list, report, err)
		}
	}
}

func TestParquetWithoutConversations(t *testing.T) {
	type row struct{ Text string }
	var b bytes.Buffer
	if err := parquet.Write(&b, []row{{"x"}}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := readAll(t, writeFile(t, "x.parquet", b.Bytes())); err == nil || !strings.Contains(err.Error(), "has the columns [Text], none of which") {
		t.Errorf("error %v", err)
	}
}

// More rows than are read at a time, in row groups smaller than that, with answers of 1 MB among them.
func TestParquetManyRows(t *testing.T) {
	type row struct {
		Prompt     string  `parquet:"prompt"`
		Completion []byte  `parquet:"completion,zstd"`
		Score      float64 `parquet:"score"`
	}
	var b bytes.Buffer
	w := parquet.NewGenericWriter[row](&b, parquet.MaxRowsPerRowGroup(50))
	long := strings.Repeat("long ", 200_000)
	for i := range 333 {
		r := row{fmt.Sprint("q", i), []byte(fmt.Sprint("a", i)), 0.5}
		if i%100 == 99 {
			r.Completion = []byte(fmt.Sprint(i, long))
		}
		if i == 200 {
			r.Completion = []byte("\xff")
		}
		if _, err := w.Write([]row{r}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	list, report, err := readAll(t, writeFile(t, "x.parquet", b.Bytes()))
	if err != nil || report.Rows != 333 || report.Bad != 1 || report.BadRows[0].Line != 201 || report.BadRows[0].Reason != `column "completion": not valid UTF-8` {
		t.Fatalf("%+v, %v", report, err)
	}
	for i, e := range list {
		n := i
		if i >= 200 {
			n++
		}
		want := fmt.Sprint("a", n)
		if n%100 == 99 {
			want = fmt.Sprint(n, long)
		}
		if e.Line != int64(n+1) || e.Prompt[0].Content != fmt.Sprint("q", n) || e.Completion[0].Content != want {
			t.Fatalf("row %d is %d %.20q %.20q", n, e.Line, e.Prompt[0].Content, e.Completion[0].Content)
		}
	}
}

func TestLongTurns(t *testing.T) {
	long := strings.Repeat("é<|end|>\\", 100_000) // 1 MB
	row, err := json.Marshal(map[string]any{"messages": []any{
		map[string]any{"role": "user", "content": long}, map[string]any{"role": "assistant", "content": long}}})
	if err != nil {
		t.Fatal(err)
	}
	list, _, err := readAll(t, writeFile(t, "x.jsonl", append(row, "\n"+goodRow...)))
	if err != nil || len(list) != 2 || list[0].Messages[1] != a(long) || list[1].Line != 2 {
		t.Fatalf("%d examples, %v", len(list), err)
	}
	for _, name := range []string{"builtin", "chatml"} {
		ids, _, _, err := Encode(tokBytes(t), rendered(t, useTemplate(t, name), list[0].Messages, false))
		if err != nil || len(ids) < 2*len(long) {
			t.Errorf("%s: %d ids, %v", name, len(ids), err)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	path := writeFile(t, "x.jsonl", []byte(goodRow))
	for _, c := range []struct {
		src  data.SourceConfig
		want string
	}{
		{data.SourceConfig{}, "stages.1.data.0.path: names no file"},
		{data.SourceConfig{Path: "nowhere.jsonl"}, "stages.1.data.0.path=nowhere.jsonl: no such file"},
		{data.SourceConfig{Path: path, Format: "text"}, "format=text holds no conversations"},
		{data.SourceConfig{Path: path, Field: "messages"}, "field=messages has no effect"},
		{data.SourceConfig{Path: path, Format: "csv"}, "stages.1.data.0.format=csv: want"},
	} {
		if _, err := Read(t.Context(), c.src, "stages.1.data.0", func(Example) error { return nil }); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q", c.src, err, c.want)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("by hand"))
	for _, path := range []string{path, "testdata/pairs.parquet"} {
		if _, err := Read(ctx, data.SourceConfig{Path: path}, "--data", func(Example) error { return nil }); err == nil || err.Error() != "by hand" {
			t.Errorf("error %v", err)
		}
	}
	if _, err := Read(t.Context(), data.SourceConfig{Path: path}.Resolved(), "--data", func(Example) error { return nil }); err != nil {
		t.Errorf("defaults spelled out: %v", err)
	}
}

// FuzzRead reads rows of any content: it finds a shape and good messages or says what is wrong, and what it calls good every
// template can write.
func FuzzRead(f *testing.F) {
	for _, row := range []string{goodRow, `{"prompt":"q","chosen":"a","rejected":"b"}`, `[{"instruction":"a","output":"b"}]`,
		`{"conversations":[{"from":"human","value":"x"},{"from":"gpt","value":"\ud83d\ude00"}]}`,
		`{"prompt":"q","completion":{"role":"assistant","content":"a"},"reward":1e999}`, "{\n[", `{"messages":[null]}`} {
		f.Add([]byte(row))
	}
	if b, err := os.ReadFile("testdata/pairs.parquet"); err == nil {
		f.Add(b)
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		path := filepath.Join(dir, "x")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		list, report, err := readAll(t, path)
		if err == nil && (report.Shape == 0 || len(list) == 0) {
			t.Fatalf("%+v without an error", report)
		}
		if int64(len(list)) != report.Rows-report.Bad {
			t.Fatalf("%d examples, %+v", len(list), report)
		}
		for _, e := range list {
			answers := [][]Message{e.Completion, e.Chosen, e.Rejected}
			for _, msgs := range append(answers, e.Messages) {
				if _, err := (builtin{}).Render(slices.Concat(e.Prompt, msgs), false); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

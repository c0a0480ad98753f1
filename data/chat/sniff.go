package chat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"moetor/data"
)

var errFound = errors.New("found")

// Sniff tells sources of conversations (true) from sources of documents, by the first row of the first file of each. Plain
// text, and rows with the field that holds a document's text, are documents. Sources of both kinds in one list are refused.
func Sniff(ctx context.Context, sources []data.SourceConfig, at string) (bool, error) {
	first := false
	for i, src := range sources {
		name := fmt.Sprintf("%s.data.%d", at, i)
		talk, err := sniff(ctx, src, name)
		if err != nil {
			return false, err
		}
		if i == 0 {
			first = talk
		} else if talk != first {
			kind := map[bool]string{true: "conversations", false: "documents"}
			return false, fmt.Errorf("%s.path=%s holds %s and %s.data.0.path=%s holds %s: a stage trains on one kind", name, src.Path, kind[talk], at, sources[0].Path, kind[first])
		}
	}
	return first, nil
}

func sniff(ctx context.Context, src data.SourceConfig, at string) (bool, error) {
	src = src.Resolved()
	if src.Format == "text" {
		return false, nil
	}
	files, err := data.Files(at+".path", src)
	if err != nil {
		return false, err
	}
	content, err := files[0].Open()
	if err != nil {
		return false, err
	}
	defer content.Close()
	head := make([]byte, 4)
	n, _ := io.ReadFull(content, head)
	if bytes.Equal(head[:n], []byte("PAR1")) {
		return true, nil
	}
	talk := false
	err = data.ScanLines(ctx, io.MultiReader(bytes.NewReader(head[:n]), content), func(number int64, line []byte, reason string) error {
		var fields map[string]json.RawMessage
		line = bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimPrefix(line, []byte("[")), []byte(","))) // the first row of a JSON array
		if reason == "" && json.Unmarshal(line, &fields) == nil && fields[src.Field] == nil {
			_, talk = Detect(fields)
		}
		if talk || number > 100 {
			return errFound
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFound) {
		return false, err
	}
	return talk, nil
}

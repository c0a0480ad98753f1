package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"unicode/utf8"

	"github.com/parquet-go/parquet-go"

	"moetor/data"
)

const (
	parquetMagic = "PAR1"
	parquetBatch = 64 // rows read at a time
)

// parquet reads a Parquet file, from the columns that have a meaning alone. Lists and structs become JSON lists and objects,
// and a column of strings may hold the JSON text of messages.
func (r *reader) parquet(ctx context.Context, f data.File) error {
	at, size, done, err := f.OpenAt()
	if err != nil {
		return err
	}
	defer done()
	rows, err := openParquet(at, size)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	defer rows.close()
	for line := int64(1); ; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		batch, end := rows.next()
		for _, row := range batch {
			fields, reason := fieldsOf(row)
			if err := r.row(f.Name(), line, fields, reason); err != nil {
				return err
			}
			line++
		}
		if end == io.EOF {
			return nil
		}
		if end != nil {
			return fmt.Errorf("%s: row %d: %w", f.Name(), line, end)
		}
	}
}

// parquetRows reads rows as maps. The library reports some kinds of damage by panicking: here that is an error.
type parquetRows struct {
	reader *parquet.Reader
	schema *parquet.Schema
	buf    []parquet.Row
}

func damaged(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("damaged Parquet data: %v", p)
	}
}

func openParquet(at io.ReaderAt, size int64) (rows *parquetRows, err error) {
	defer damaged(&err)
	file, err := parquet.OpenFile(at, size)
	if err != nil {
		return nil, fmt.Errorf("not readable as Parquet: %w", err)
	}
	group := make(parquet.Group)
	for _, field := range file.Schema().Fields() {
		if slices.Contains(rowFields, field.Name()) {
			group[field.Name()] = field
		}
	}
	if len(group) == 0 {
		names := make([]string, 0, len(file.Schema().Fields()))
		for _, field := range file.Schema().Fields() {
			names = append(names, field.Name())
		}
		return nil, fmt.Errorf("has the columns %.200v, none of which is one of conversations: %v", names, rowFields)
	}
	schema := parquet.NewSchema("conversations", group)
	return &parquetRows{reader: parquet.NewReader(file, schema), schema: schema, buf: make([]parquet.Row, parquetBatch)}, nil
}

func (p *parquetRows) close() { p.reader.Close() }

// next returns rows, and io.EOF with or after the last.
func (p *parquetRows) next() (rows []map[string]any, err error) {
	defer damaged(&err)
	n, err := p.reader.ReadRows(p.buf)
	for _, row := range p.buf[:n] {
		fields := make(map[string]any)
		if err := p.schema.Reconstruct(&fields, row); err != nil {
			return rows, err
		}
		rows = append(rows, fields)
	}
	if n == 0 && err == nil {
		err = io.ErrNoProgress
	}
	return rows, err
}

// fieldsOf returns a row's columns as JSON, or why that cannot be.
func fieldsOf(row map[string]any) (map[string]json.RawMessage, string) {
	fields := make(map[string]json.RawMessage, len(row))
	for _, name := range rowFields {
		value, ok := row[name]
		if !ok || value == nil {
			continue
		}
		value, err := jsonValue(value)
		if err != nil {
			return nil, fmt.Sprintf("column %q: %v", name, err)
		}
		if text, ok := value.(string); ok && isMessages(name, text) {
			fields[name] = json.RawMessage(text)
			continue
		}
		raw, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Sprintf("column %q: %v", name, err)
		}
		fields[name] = raw
	}
	return fields, ""
}

// isMessages says whether a column's string is the JSON text of messages: surely so in a column that holds nothing else,
// and in one of prompts or answers if it is a list of nothing but messages.
func isMessages(name, text string) bool {
	if text == "" || text[0] != '[' || !json.Valid([]byte(text)) {
		return false
	}
	switch name {
	case "messages", "conversations", "history":
		return true
	case "prompt", "completion", "chosen", "rejected":
		var list []map[string]json.RawMessage
		return json.Unmarshal([]byte(text), &list) == nil && len(list) > 0 &&
			!slices.ContainsFunc(list, func(m map[string]json.RawMessage) bool {
				return isNull(m["role"]) && isNull(m["from"])
			})
	}
	return false
}

// jsonValue makes a value of encoding/json's kinds of what a row holds.
func jsonValue(v any) (any, error) {
	switch v := v.(type) {
	case []byte:
		return jsonValue(string(v))
	case string:
		if !utf8.ValidString(v) {
			return nil, errors.New("not valid UTF-8")
		}
		return v, nil
	case float32:
		return jsonValue(float64(v))
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("%v is not a number", v)
		}
		return v, nil
	case map[string]any:
		if inner, ok := listInside(v); ok {
			return jsonValue(inner)
		}
		for name, member := range v {
			value, err := jsonValue(member)
			if err != nil {
				return nil, err
			}
			v[name] = value
		}
		return v, nil
	case []any:
		return jsonList(v)
	case []map[string]any:
		return jsonList(v)
	case []string:
		return jsonList(v)
	}
	return v, nil
}

func jsonList[T any](list []T) ([]any, error) {
	out := make([]any, len(list))
	for i, item := range list {
		value, err := jsonValue(item)
		if err != nil {
			return nil, err
		}
		out[i] = value
	}
	return out, nil
}

// listInside undoes the wrapping of lists that writers other than the present standard's use and that the library hands on
// as it finds it: {list: [{element: …}]} (Parquet logical types, "Lists", backward-compatibility rules).
func listInside(v map[string]any) ([]any, bool) {
	if len(v) != 1 {
		return nil, false
	}
	for outer, list := range v {
		items, ok := list.([]any)
		if !ok || outer != "list" && outer != "bag" && outer != "array" {
			return nil, false
		}
		for i, item := range items {
			if m, ok := item.(map[string]any); ok && len(m) == 1 {
				for inner, value := range m {
					if inner == "element" || inner == "item" || inner == "array_element" {
						items[i] = value
					}
				}
			}
		}
		return items, true
	}
	return nil, false
}

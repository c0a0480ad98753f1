package configs

import (
	"bytes"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"moetor/optimizer"
)

// Marshal writes every setting of r as YAML, defaults included. Parse gives an equal Run back.
func Marshal(r *Run) []byte {
	var b bytes.Buffer
	block(&b, reflect.ValueOf(r).Elem(), "", "")
	return b.Bytes()
}

// lineLength is how long a mapping on one line may be.
const lineLength = 120

// block writes the fields of struct v, one a line. first stands before the first line, indent before the others.
func block(b *bytes.Buffer, v reflect.Value, first, indent string) {
	prefix := first
	for i := range v.NumField() {
		name, f := key(v.Type().Field(i)), v.Field(i)
		if name == "" || absent(f) {
			continue
		}
		b.WriteString(prefix + name + ":")
		prefix = indent
		line := flow(f)
		switch {
		case nested(f) || len(indent)+len(name)+len(line)+2 > lineLength && f.Kind() == reflect.Struct:
			b.WriteByte('\n')
			block(b, f, indent+"  ", indent+"  ")
		case f.Kind() == reflect.Slice && f.Len() > 0 && f.Type() != piecewiseType && f.Type().Elem().Kind() == reflect.Struct:
			b.WriteByte('\n')
			for j := range f.Len() {
				if e := f.Index(j); nested(e) {
					block(b, e, indent+"  - ", indent+"    ")
				} else {
					b.WriteString(indent + "  - " + flow(e) + "\n")
				}
			}
		default:
			b.WriteString(" " + line + "\n")
		}
	}
}

// nested reports whether struct v holds other mappings, so needs a block.
func nested(v reflect.Value) bool {
	if v.Kind() != reflect.Struct {
		return false
	}
	for i := range v.NumField() {
		if f := v.Field(i); key(v.Type().Field(i)) != "" && f.Kind() == reflect.Struct {
			return true
		}
	}
	return false
}

// absent reports whether v is an optional value that is not set, which only a Run that was not loaded can have.
func absent(v reflect.Value) bool { return v.Kind() == reflect.Pointer && v.IsNil() }

// flow writes v on one line.
func flow(v reflect.Value) string {
	if v.Type() == durationType {
		return duration(time.Duration(v.Int()))
	}
	if p, ok := v.Interface().(optimizer.Piecewise); ok && len(p) == 1 && p[0].UntilTokens == 0 {
		return float(p[0].Value)
	}
	switch v.Kind() {
	case reflect.Pointer:
		return flow(v.Elem())
	case reflect.Struct:
		var parts []string
		for i := range v.NumField() {
			if k := key(v.Type().Field(i)); k != "" && !absent(v.Field(i)) {
				parts = append(parts, k+": "+flow(v.Field(i)))
			}
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case reflect.Slice:
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = flow(v.Index(i))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case reflect.String:
		return text(v.String())
	case reflect.Float64:
		return float(v.Float())
	}
	return fmt.Sprint(v.Interface())
}

// float writes x so that every YAML version reads a number: with a point before an exponent.
func float(x float64) string {
	s := strconv.FormatFloat(x, 'g', -1, 64)
	digits, exponent, ok := strings.Cut(s, "e")
	if !ok {
		return s
	}
	if !strings.Contains(digits, ".") {
		digits += ".0"
	}
	return digits + "e" + exponent[:1] + strings.TrimLeft(exponent[1:], "0")
}

// duration writes whole seconds as such: 60s, not 1m0s.
func duration(d time.Duration) string {
	if d%time.Second == 0 {
		return fmt.Sprintf("%ds", d/time.Second)
	}
	return d.String()
}

var plainText = regexp.MustCompile(`^[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*$`)

// text quotes what YAML might read as something else than the text itself.
func text(s string) string {
	switch strings.ToLower(s) {
	case "true", "false", "null", "yes", "no", "on", "off", "y", "n":
		return strconv.Quote(s)
	}
	if plainText.MatchString(s) {
		return s
	}
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < 0x20 || r == 0x7f || r == 0x85 || r == 0xa0 || r == 0x2028 || r == 0x2029 || r == 0xfeff:
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

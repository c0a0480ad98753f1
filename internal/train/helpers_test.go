package train

import (
	"os"
	"strings"
	"testing"
)

// writeVal writes a validation text and returns its path.
func writeVal(t *testing.T, path string) string {
	t.Helper()
	text := strings.Repeat("The quality of mercy is not strain'd, it droppeth as the gentle rain from heaven upon the place beneath. ", 6)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func replaceVal(text, path string) string { return strings.ReplaceAll(text, "VALFILE", path) }

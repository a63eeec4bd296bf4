// Command quantity says what resource.Quantity makes of each JSON string on stdin, one per line.
package main

import (
	"bufio"
	"encoding/json"
	"os"

	"k8s.io/apimachinery/pkg/api/resource"
)

func main() {
	in := bufio.NewScanner(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for in.Scan() {
		var text string
		if err := json.Unmarshal(in.Bytes(), &text); err != nil {
			panic(err)
		}
		q, err := resource.ParseQuantity(text)
		if err != nil {
			out.Encode(map[string]any{"text": text, "error": err.Error()})
			continue
		}
		// The amount itself is unscaled / 10^scale: Value() wraps, and String() drops exponents.
		value, dec := q.Value(), q.AsDec()
		out.Encode(map[string]any{"text": text, "value": value,
			"unscaled": dec.UnscaledBig().String(), "scale": dec.Scale()})
	}
}

// Ollama's own reading of its environment, and what it hands to llama-server, whose path is the argument.
package main

import (
	"fmt"
	"os"
	"os/exec"

	"github.com/ollama/ollama/envconfig"
	"github.com/ollama/ollama/llm"
)

func main() {
	fmt.Printf("max_loaded_models=%d keeps_models=%t\n", envconfig.MaxRunners(), envconfig.KeepAlive().Hours() > 1e6)
	server := exec.Command(os.Args[1], "--model", "m.gguf")
	llm.SetupLlamaServerCommandEnv(server, os.Args[1], nil, nil)
	server.Stdout, server.Stderr = os.Stdout, os.Stderr
	if err := server.Run(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// Runs the memory recommender of the Vertical Pod Autoscaler, with its default configuration, on
// the lives of containers read from stdin:
//
//	w              a new workload
//	s LIFE T BYTES container LIFE uses BYTES at T seconds
//	o LIFE T BYTES container LIFE, which requested BYTES, is killed because it is out of memory
//	r T            print the target in bytes; 0 without samples
//
// Samples come in order of time. -half-life sets the flag memory-histogram-decay-half-life.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/autoscaler/vertical-pod-autoscaler/pkg/recommender/logic"
	"k8s.io/autoscaler/vertical-pod-autoscaler/pkg/recommender/model"
)

func main() {
	halfLife := flag.Duration("half-life", model.DefaultMemoryHistogramDecayHalfLife, "")
	flag.Parse()
	model.InitializeAggregationsConfig(model.NewAggregationsConfig(
		model.DefaultMemoryAggregationInterval, model.DefaultMemoryAggregationIntervalCount,
		*halfLife, model.DefaultCPUHistogramDecayHalfLife,
		model.DefaultOOMBumpUpRatio, model.DefaultOOMMinBumpUp))
	// The defaults of the recommender's flags.
	recommender := logic.CreatePodResourceRecommender(logic.RecommendationConfig{
		SafetyMarginFraction: 0.15, PodMinCPUMillicores: 25, PodMinMemoryMb: 250,
		TargetCPUPercentile: 0.9, LowerBoundCPUPercentile: 0.5, UpperBoundCPUPercentile: 0.95,
		ConfidenceIntervalCPU:  24 * time.Hour,
		TargetMemoryPercentile: 0.9, LowerBoundMemoryPercentile: 0.5, UpperBoundMemoryPercentile: 0.95,
		ConfidenceIntervalMemory: 24 * time.Hour,
	})
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(make([]byte, 1<<16), 1<<16)
	var aggregate *model.AggregateContainerState
	var lives map[string]*model.ContainerState
	for in.Scan() {
		words := strings.Fields(in.Text())
		switch words[0] {
		case "w":
			aggregate = model.NewAggregateContainerState()
			aggregate.UpdateFromPolicy(nil)
			lives = map[string]*model.ContainerState{}
		case "s", "o":
			life, known := lives[words[1]]
			if !known {
				life = model.NewContainerState(nil, aggregate)
				lives[words[1]] = life
			}
			at, bytes := moment(words[2]), model.MemoryAmountFromBytes(number(words[3]))
			if words[0] == "o" {
				if err := life.RecordOOM(at, bytes); err != nil {
					fail(err)
				}
				break
			}
			life.AddSample(&model.ContainerUsageSample{
				MeasureStart: at, Usage: bytes, Resource: model.ResourceMemory})
		case "r":
			target := 0.0
			if aggregate.TotalSamplesCount > 0 || !aggregate.AggregateMemoryPeaks.IsEmpty() {
				states := model.ContainerNameToAggregateStateMap{"main": aggregate}
				resources := recommender.GetRecommendedPodResources(states)["main"]
				target = model.BytesFromMemoryAmount(resources.Target[model.ResourceMemory])
			}
			fmt.Fprintf(out, "%.0f\n", target)
		}
	}
	if err := in.Err(); err != nil {
		fail(err)
	}
}

func moment(text string) time.Time {
	return time.Unix(1700000000, 0).Add(time.Duration(number(text) * float64(time.Second)))
}

func number(text string) float64 {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		fail(err)
	}
	return value
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

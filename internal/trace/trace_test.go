package trace

import (
	"bytes"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"
)

func TestNestedSpansAddUpToTheWall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Recorder
		r.Record(true)
		r.StartStep(7)
		time.Sleep(2 * time.Millisecond) // in no span
		r.Begin(Forward, "0F0")
		time.Sleep(10 * time.Millisecond)
		r.Begin(Dispatch, "")
		time.Sleep(3 * time.Millisecond)
		r.End()
		time.Sleep(5 * time.Millisecond)
		r.End()
		b := r.EndStep()
		want := map[Kind]time.Duration{Forward: 15 * time.Millisecond, Dispatch: 3 * time.Millisecond, Other: 2 * time.Millisecond}
		var sum time.Duration
		for _, k := range Kinds() {
			sum += b.By[k]
			if b.By[k] != want[k] {
				t.Errorf("%v: %v, want %v", k, b.By[k], want[k])
			}
		}
		if sum != b.Total || b.Total != 20*time.Millisecond {
			t.Errorf("kinds add up to %v, wall %v", sum, b.Total)
		}
		ev := r.Events()
		if len(ev) != 2 || ev[0].Kind != Dispatch || ev[1].Label != "0F0" || ev[1].End-ev[1].Start != 18e6 || ev[0].Step != 7 {
			t.Errorf("events %+v", ev)
		}
	})
}

func TestNilRecorderIsSilent(t *testing.T) {
	var r *Recorder
	r.StartStep(1)
	r.Begin(Data, "")
	r.End()
	if b := r.EndStep(); b.Total != 0 || r.Recording() || r.Events() != nil {
		t.Error("a nil recorder recorded something")
	}
}

func TestChromeTracePutsRanksOnOneClock(t *testing.T) {
	// Rank 1's clock is 500 ns behind rank 0's: the same instant must get the same ts.
	tracks := []Track{
		{Rank: 0, Name: "rank 0", Events: []Event{{Kind: Forward, Label: "0F0", Start: 10_000, End: 12_000}}},
		{Rank: 1, Name: "rank 1", Offset: 500, Events: []Event{{Kind: Idle, Start: 9_500, End: 11_500}}},
	}
	var out bytes.Buffer
	if err := WriteChrome(&out, tracks); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		TraceEvents []struct {
			Name, Ph string
			Ts, Dur  float64
			Pid      int
		}
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil {
		t.Fatalf("%v in %s", err, out.String())
	}
	spans := 0
	for _, e := range doc.TraceEvents {
		if e.Ph == "X" {
			spans++
			if e.Ts != 0 || e.Dur != 2 {
				t.Errorf("%s on rank %d at %v for %v us, want 0 for 2", e.Name, e.Pid, e.Ts, e.Dur)
			}
		}
	}
	if spans != 2 {
		t.Errorf("%d spans, want 2", spans)
	}
}

func TestOffsetTrustsTheShortestRoundTrip(t *testing.T) {
	got := Offset([]Probe{
		{Sent: 0, There: 9_000, Back: 10_000}, // slow and lopsided
		{Sent: 100, There: 1_200, Back: 300},  // round trip 200, midpoint 200
	})
	if got != 1000 {
		t.Errorf("offset %d, want 1000", got)
	}
}

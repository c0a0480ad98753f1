package model

import "fmt"

// A BatchDecoder continues several samples of one prompt, all in one batch: the prompt is taken once, and each step takes
// the next tokens of all samples through every product together. A sample has the bits it would have in a Decoder of its
// own, and the others may stop before it.
type BatchDecoder struct {
	prompt  *Decoder
	samples []*sequence
	live    []*sequence // of the present step, and its tokens
	tokens  []int32
	logits  [][]float32
}

// NewBatchDecoder makes a decoder of n samples; chunks are as in NewDecoder.
func NewBatchDecoder(n int, chunks ...*Chunk) (*BatchDecoder, error) {
	if n < 1 {
		return nil, fmt.Errorf("model: a decoder of %d samples", n)
	}
	d, err := NewDecoder(chunks...)
	if err != nil {
		return nil, err
	}
	b := &BatchDecoder{prompt: d, logits: make([][]float32, n)}
	for range n {
		b.samples = append(b.samples, newSequence(d.config))
	}
	return b, nil
}

// Len is the number of tokens that sample i has taken, the prompt included.
func (b *BatchDecoder) Len(i int) int { return b.samples[i].length }

// Reset forgets the prompt and all samples.
func (b *BatchDecoder) Reset() {
	b.prompt.Reset()
	for _, s := range b.samples {
		s.length = 0
	}
}

// Prefill takes a prompt, or more of it, and starts all samples anew after it. It returns the logits of the token that
// follows, valid until the next call: the same for all samples.
func (b *BatchDecoder) Prefill(tokens []int32) ([]float32, error) {
	from := b.prompt.Len() // the samples have the prompt up to here: they only ever wrote behind it
	logits, err := b.prompt.Prefill(tokens)
	if err != nil {
		return nil, err
	}
	to := b.prompt.Len()
	for _, s := range b.samples {
		s.length = to
		for l, past := range b.prompt.own[0].caches {
			copy(s.caches[l].c.RowRange(from, to).Data, past.c.RowRange(from, to).Data)
			copy(s.caches[l].kr.RowRange(from, to).Data, past.kr.RowRange(from, to).Data)
		}
	}
	return logits, nil
}

// Step takes one token for each sample and returns each one's next logits, valid until the next call. A negative token
// means that the sample takes none, since it has ended; its logits are nil.
func (b *BatchDecoder) Step(tokens []int32) ([][]float32, error) {
	d := b.prompt
	if len(tokens) != len(b.samples) {
		return nil, fmt.Errorf("model: %d tokens for %d samples", len(tokens), len(b.samples))
	}
	if d.Len() == 0 {
		return nil, fmt.Errorf("model: the samples have no prompt")
	}
	b.live, b.tokens = b.live[:0], b.tokens[:0]
	clear(b.logits)
	for i, t := range tokens {
		if t < 0 {
			continue
		}
		if err := b.samples[i].room(d.config, 1); err != nil {
			return nil, err
		}
		b.live, b.tokens = append(b.live, b.samples[i]), append(b.tokens, t)
	}
	if len(b.live) == 0 {
		return b.logits, nil
	}
	x, err := d.advance(b.live, b.tokens)
	if err != nil {
		return nil, err
	}
	logits := d.project(x)
	at := 0
	for i, t := range tokens {
		if t >= 0 {
			b.logits[i] = logits.Row(at)
			at++
		}
	}
	return b.logits, nil
}

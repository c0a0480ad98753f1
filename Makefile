# Two commands matter: make demo (the main job, on embedded text) and make test (everything CI checks).
GO    ?= go
TRAIN := bin/train
# Only checkpoint needs cgo; without it everything must still cross-compile, with portable kernels.
CROSS := linux/arm64 darwin/arm64

.PHONY: demo build test deps testdeps vet cross generate golden golden-update exhaustive race acceptance clean

QUESTION := What does the command `ls` do?
demo: build
	rm -rf runs/demo
	$(TRAIN) launch -n 4 --config demo --out runs/demo
	@echo
	@echo "--- after each stage, asked: $(subst `,\`,$(QUESTION))"
	@for stage in pretrain instruct preference; do \
		printf '%-11s' "$$stage:"; \
		$(TRAIN) generate --checkpoint "$$(ls -d runs/demo/checkpoints/$$stage-* | tail -n 1)" --chat --prompt '$(QUESTION)' --tokens 100 --temperature 0.3 --top-k 20 --seed 1; \
	done
	@echo "--- reward accuracy on held-out pairs: $$(grep -o '"val_reward_accuracy":[0-9.]*' runs/demo/metrics.jsonl | tail -n 1 | cut -d: -f2)"
	@echo "--- the pretrained model, continuing a prompt:"
	@$(TRAIN) generate --checkpoint "$$(ls -d runs/demo/checkpoints/pretrain-* | tail -n 1)" --prompt "ROMEO:" --tokens 200 --temperature 0.7 --seed 1
	@echo
	@echo "The run is in runs/demo: metrics.jsonl, checkpoints/ (HDF5: h5dump -H runs/demo/checkpoints/*/rank-0000.h5)."
	@echo "Next:  $(TRAIN) inspect runs/demo"
	@echo "       $(TRAIN) generate --checkpoint runs/demo --chat"
	@echo "       $(TRAIN) launch -n 4 --config demo --out runs/demo --resume --set stages.2.steps=120"
	@echo "       $(TRAIN) eval --checkpoint runs/demo --data FILE.txt"
	@echo "       $(TRAIN) config list"

build: deps
	$(GO) build -o $(TRAIN) ./cmd/train

deps:
	@./scripts/deps.sh

testdeps:
	@./scripts/deps.sh tests

test: testdeps vet cross
	$(GO) test ./...
	$(GO) test -tags purego ./internal/lowp ./internal/kernel ./model
	$(GO) test -race -short ./comm/... ./parallel/... ./data

vet:
	@test -z "$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go'))" || { gofmt -l .; echo "gofmt differs"; exit 1; }
	$(GO) vet ./...

cross:
	@for p in $(CROSS); do echo "cross-compile $$p"; \
		CGO_ENABLED=0 GOOS=$${p%/*} GOARCH=$${p#*/} $(GO) build ./... || exit 1; done

# Regenerates the assembly and fails if it differs from what is committed.
generate:
	cd internal/kernel/_gen && $(GO) run . -out ../micro_amd64.s -stubs ../micro_decl_amd64.go -pkg kernel
	cd internal/kernel/_gen && $(GO) run . -scaled -out ../scaled_amd64.s -stubs ../scaled_decl_amd64.go -pkg kernel
	cd internal/kernel/_gen && $(GO) run . -hopper -out ../hopper_amd64.s -stubs ../hopper_decl_amd64.go -pkg kernel
	cd internal/lowp/_gen && $(GO) run . -out ../lowp_amd64.s -stubs ../lowp_decl_amd64.go -pkg lowp
	git diff --exit-code internal/kernel internal/lowp

# Compares the first steps of all presets, all digits, with internal/train/testdata/golden; test does so for the small ones.
golden: deps
	MOETOR_GOLDEN=all $(GO) test ./internal/train -run TestGolden

# Rewrites those files, after a change that is meant to change numbers. It needs a CPU with all kernel implementations.
golden-update: deps
	$(GO) test ./internal/train -run TestGolden -update

# Every float32 through every encoding on every implementation, and ten minutes of fuzzing of each kernel against its specification.
exhaustive:
	MOETOR_EXHAUSTIVE=1 $(GO) test -run EncodeSweep -timeout 3h ./internal/lowp
	@for f in $$($(GO) test -list '^Fuzz' ./internal/kernel | grep ^Fuzz); do $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime 10m ./internal/kernel || exit 1; done
	@for f in $$($(GO) test -list '^Fuzz' ./internal/lowp | grep ^Fuzz); do $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime 10m ./internal/lowp || exit 1; done

# The race detector over what computes, on the portable path, which it can see into: half an hour of two cores.
race:
	$(GO) test -race -tags purego -timeout 1h ./internal/kernel ./internal/lowp ./optimizer ./model

# Long checks that CI does not run; their results are in docs/.
acceptance: build
	./scripts/acceptance.sh

clean:
	rm -rf bin runs

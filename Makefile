# Braid. `make help` lists the targets.

GO        ?= go
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT    ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS   := -X braid/cmd/internal/version.version=$(VERSION) -X braid/cmd/internal/version.commit=$(COMMIT)
BIN       := bin/braid

# Versions of tools that are run and never linked.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# Micro-benchmarks: how long, and where they are. BENCHTIME=1x only shows that they still run.
BENCHTIME  ?= 1s
BENCH_PKGS ?= $(sort $(dir $(addprefix ./,$(shell git ls-files '*_test.go' | xargs grep -l '^func Benchmark' | grep -v '^cmd/tests/'))))

# Packages with goroutines. The simulator has one, and would only be slow.
RACE_PKGS ?= $(shell $(GO) list ./... | grep -v -e /sim$$ -e /rules$$)

.PHONY: help build run etcdctl test race sim bench lint staticcheck generate fmt clean etcd-diff robustness etcd-robustness etcd-common etcd-e2e kubernetes pgo ci

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

build: ## bin/braid
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/braid

run: build ## a full store on this machine, data in default.braid
	$(BIN)

# go install refuses etcdctl for the replacements in its go.mod, so the module with the comparisons builds it.
etcdctl: ## bin/etcdctl, etcd's own client
	cd cmd/tests && $(GO) build -o $(CURDIR)/bin/etcdctl go.etcd.io/etcd/etcdctl/v3

test: ## every unit, rule and process test
	$(GO) vet ./...
	$(GO) test -timeout 10m ./...

race: ## the same with the race detector, random tests in short
	$(GO) test -race -short -pgo=off -timeout 20m $(RACE_PKGS)

# How much the simulator runs: SEEDS from SEED on, STEPS each; ranges of seeds can run side by side.
SEED  ?= 1
SEEDS ?= 2000
STEPS ?= 3000

sim: ## simulated clusters from seeds, and without each rule (SEED, SEEDS, STEPS)
	$(GO) test ./cmd/internal/sim -count=1 -v -timeout 0 -sim.seed=$(SEED) -sim.seeds=$(SEEDS) -sim.steps=$(STEPS)

bench: ## micro-benchmarks of the cores (BENCHTIME, BENCH_PKGS)
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) $(BENCH_PKGS)

# The programs below compare with a real etcd; they have a module of their own.
etcd-diff: ## the same random requests at braid and at a real etcd (ARGS)
	cd cmd/tests && $(GO) run ./differential $(ARGS)

robustness: ## three processes under kill -9, stop and continue, checked (ARGS)
	cd cmd/tests && $(GO) run ./robustness $(ARGS)

etcd-robustness: ## etcd's robustness traffic and validators on three processes (ARGS)
	cd cmd/tests && $(GO) run ./etcdrobustness $(ARGS)

etcd-common: build ## etcd's common suite, on one region and on several (ETCD_SUITES names its runner)
	cmd/tests/etcdsuites/common $(BIN) $(ARGS)

etcd-e2e: build ## what etcd's e2e suite says of the process, its ports and pages (ETCD_SUITES)
	cmd/tests/etcdsuites/e2e $(BIN) $(ARGS)

kubernetes: build ## Kubernetes on three processes: ARGS says what (KUBERNETES_SUITES, KUBERNETES_PROGRAMS name it)
	cd cmd/tests && $(GO) run ./kubernetes -braid $(abspath $(BIN)) $(ARGS)

pgo: ## the profile that the compiler optimises braid by, measured anew (minutes)
	cd cmd/tests && $(GO) run ./pgo -out ../braid/default.pgo

fmt: ## format the sources
	gofmt -w $$(git ls-files '*.go')

lint: staticcheck ## gofmt, vet, staticcheck
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not formatted:"; echo "$$out"; exit 1; fi
	$(GO) vet ./...

staticcheck:
	$(GO) run $(STATICCHECK) ./...

ci: ## what continuous integration runs
	.ci/run

generate: ## regenerate what is generated (needs protoc)
	protoc --proto_path=. \
	  --plugin=protoc-gen-go=$(CURDIR)/.ci/protoc-gen-go --plugin=protoc-gen-go-grpc=$(CURDIR)/.ci/protoc-gen-go-grpc \
	  --go_out=. --go_opt=module=braid --go-grpc_out=. --go-grpc_opt=module=braid \
	  cmd/internal/admin/adminpb/admin.proto

clean: ## remove what was built
	rm -rf bin

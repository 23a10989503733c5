# `make` lists the targets. CI only runs targets of this file.

VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
FUZZTIME ?= 30s
FUZZ     ?= ./...
ROUNDS   ?= 5

BIN      := bin
LDFLAGS  := -s -w -X github.com/isthmus-net/isthmus/internal/cli.release=$(VERSION)
GOLANGCI := $(BIN)/tools/golangci-lint
FORK     := $(BIN)/tools/tailscale-wireguard-go
COMPARE  := go run ./benchmarks/compare -isthmus $(BIN)/isthmus -tailscale $(FORK)

# Binaries are static. Only the race detector needs cgo; `make test` enables cgo for these tests.
export CGO_ENABLED = 0

.DEFAULT_GOAL := help
.PHONY: help
help: ## Print this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/isthmus and bin/isthmus-lab, static and reproducible
	@mkdir -p $(BIN)
	@internal/tools/progress.sh -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/isthmus ./cmd/isthmus-lab

# All files in the image have the time of the commit, so that the build is reproducible.
PLATFORMS ?= linux/amd64,linux/arm64
IMAGE     ?= ghcr.io/isthmus-net/isthmus:$(VERSION)
CREATED   := $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
CTR       ?= ctr -n k8s.io
comma     := ,

.PHONY: image
image: ## Build bin/isthmus-image.tar, an OCI image for PLATFORMS (linux/amd64,linux/arm64), named IMAGE; needs only Go
	@mkdir -p $(BIN)/image
	@set -e; for p in $(subst $(comma), ,$(PLATFORMS)); do GOOS=$${p%/*} GOARCH=$${p#*/} internal/tools/progress.sh \
		-trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o $(BIN)/image/$${p%/*}-$${p#*/}/isthmus ./cmd/isthmus; done
	@go run -C internal/tools ./roots > $(BIN)/image/roots.pem
	@go run ./internal/image/build -binaries $(BIN)/image -platforms $(PLATFORMS) -roots $(BIN)/image/roots.pem -ref $(IMAGE) \
		-version $(VERSION) -revision "$$(git rev-parse HEAD 2>/dev/null)" -created $(CREATED) -out $(BIN)/isthmus-image.tar

.PHONY: image-load
image-load: ## Import bin/isthmus-image.tar into containerd, by the command CTR ("ctr -n k8s.io")
	$(CTR) images import $(BIN)/isthmus-image.tar

# The target checks for root and TUN before it builds anything, and prints what it builds and how long that takes.
.PHONY: demo
demo: ## Clusters with the same PodCIDR on this machine: two joined by files, three with API servers, with real traffic (root)
	@if [ "$$(id -u)" -ne 0 ]; then \
		echo "make demo needs root, because it makes network namespaces and TUN devices: try 'sudo make demo'"; exit 1; fi
	@if ! [ -c /dev/net/tun ]; then \
		echo "make demo needs /dev/net/tun for the gateways' TUN devices, but it is missing: try 'modprobe tun'"; exit 1; fi
	@echo "make demo: clusters on this machine, two joined by files, then three with API servers, with real traffic: under a minute once everything is built."
	@[ -x $(BIN)/isthmus-lab ] || echo "First it builds isthmus and isthmus-lab: two to five minutes on two cores, once."
	@[ -n "$$ISTHMUS_KUBE" ] || ls -d $(BIN)/kube-v* >/dev/null 2>&1 || \
		echo "While the first part runs, it begins to build etcd, kube-apiserver and kube-controller-manager from source: four to eight minutes on two cores, once."
	@$(MAKE) --no-print-directory build
	@$(BIN)/isthmus-lab demo

.PHONY: test
test: deps ## Everything CI runs: generated files, vet, lint, all tests, with -race where goroutines share data (as root: also in namespaces)
	@go run ./internal/ci

.PHONY: kube
kube: ## Build etcd and kube-apiserver for the tests and the demo, if missing (4 to 8 minutes, once)
	@go run ./cmd/isthmus-lab kube

# The tests start the programs in the directory ISTHMUS_KUBE.
.PHONY: test-oldest
test-oldest: ## Tests of the control plane on Kubernetes 1.31 (builds it once, 4 to 9 minutes)
	@ISTHMUS_KUBE=$$(go run ./cmd/isthmus-lab kube --oldest) && export ISTHMUS_KUBE || exit; failed=0; \
	go test -count=1 -timeout=45m ./manager/... ./internal/peering ./internal/install ./internal/uninstall ./internal/inspect ./internal/place ./internal/source/kube || failed=1; \
	go test -C test -count=1 -timeout=45m ./control ./crd || failed=1; exit $$failed

# Clusters with real nodes need these commands; each is followed by its Debian package.
NODES := containerd:containerd runc:runc nft:nftables iptables:iptables conntrack:conntrack kubectl:kubernetes-client

.PHONY: deps-nodes
deps-nodes: ## Install containerd and CNI plugins, and build kubelet and the other programs of a node, for test-nodes and demo-kubernetes (5 to 10 minutes, once)
	@missing=; for c in $(NODES); do command -v "$${c%%:*}" >/dev/null || missing="$$missing $${c##*:}"; done; \
	[ -x /usr/lib/cni/bridge ] || missing="$$missing containernetworking-plugins"; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then echo "not installed:$$missing"; exit 1; fi; \
		echo "installing for the nodes: apt-get install$$missing"; apt-get update -qq; \
		: "nodes start containerd themselves"; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi
	@go run ./cmd/isthmus-lab kube --nodes

.PHONY: demo-kubernetes
demo-kubernetes: deps-nodes build ## Two clusters with real kubelets: install, peer, and call a Service of the other cluster by its name, with times (root)
	@$(BIN)/isthmus-lab demo --kubernetes

.PHONY: test-nodes
test-nodes: deps-nodes ## All tests on clusters with real kubelets: the matrix, Services, transfers, faults, upgrade and uninstall (root, an hour)
	go test -C test -count=1 -timeout=90m -v ./nodes -all

# The suite's pods run these commands, from Debian packages, because the suite's images need a registry.
MCS := socat:socat nc.openbsd:netcat-openbsd nslookup:bind9-dnsutils

.PHONY: deps-mcs
deps-mcs: deps-nodes ## Install socat, nc and nslookup, which the pods of the Multi-Cluster Services suite run
	@missing=; for c in $(MCS); do command -v "$${c%%:*}" >/dev/null || missing="$$missing $${c##*:}"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then echo "not installed:$$missing"; exit 1; fi; \
		echo "installing for the suite: apt-get install$$missing"; apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi

# The suite's module is not published, so SUITE is a checkout of https://github.com/kubernetes-sigs/mcs-api.
# RUN selects runs by a regular expression.
SUITE ?=
RUN   ?=

.PHONY: test-mcs
test-mcs: deps-mcs ## The conformance suite of the Multi-Cluster Services API from SUITE, a checkout of kubernetes-sigs/mcs-api (root, an hour)
	@[ -d "$(SUITE)/conformance" ] || { echo "SUITE=$(SUITE): want a checkout of https://github.com/kubernetes-sigs/mcs-api"; exit 1; }
	go test -C test -count=1 -timeout=120m -v ./nodes -all -run 'TestServicesPassTheMultiClusterConformanceSuite/$(RUN)' -suite "$(abspath $(SUITE))"

.PHONY: test-cni
test-cni: build deps kube ## Test Isthmus beside the pod network of each CNI, with faults for a minute (root, an hour)
	go test -C test -count=1 -timeout=90m -v ./cni -long

.PHONY: test-votes
test-votes: ## Search millions of states of gateways and voters for two active gateways, and check that the search finds each deliberate bug (one to two hours)
	go test -count=1 -timeout=4h ./internal/mandate -whole -most 4000000

SOAK ?= 4h

.PHONY: soak
soak: build deps kube ## Run three clusters for SOAK with traffic and changes, and check that memory, goroutines, descriptors, flows and objects do not grow (root)
	go test -C test -count=1 -timeout=0 -v ./fleet -run '^TestSoak$$' -soak $(SOAK)

# qemu's user mode does not support netlink for nftables and policy rules, so no gateway runs in a namespace.
# The tests of gateway/datapath (TestTwoGateways...) connect pairs of gateways with TUN and UDP in memory. qemu also
# does not pass on the kernel's count of lost datagrams, which the skipped test reads.
ARM64      := ./packet/... ./natengine/... ./fabric ./internal/diff ./internal/keyring ./internal/postquantum ./gateway/bind ./gateway/check ./gateway/datapath ./gateway/flowsync ./gateway/tun ./manager/ipam
ARM64_SKIP := ^TestDatagramsWithoutBufferSpaceAreCounted$$

.PHONY: test-arm64
test-arm64: ## Unit tests of packet path, TUN, sockets and keys, two gateways in memory, and the image's program, on arm64 under qemu (installs qemu-user; 20 minutes)
	@command -v qemu-aarch64 >/dev/null || { \
		if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then echo "not installed: qemu-user"; exit 1; fi; \
		echo "installing for the tests: apt-get install qemu-user"; apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-user >/dev/null; }
	GOARCH=arm64 go test -exec qemu-aarch64 -count=1 -p 2 -timeout=40m -skip '$(ARM64_SKIP)' $(ARM64)
	@: "the only compressed archive in the image is the layer with the program"
	@rm -rf $(BIN)/arm64; $(MAKE) --no-print-directory image BIN=$(BIN)/arm64 PLATFORMS=linux/arm64
	@set -e; tar -xf $(BIN)/arm64/isthmus-image.tar -C $(BIN)/arm64; \
	for b in $(BIN)/arm64/blobs/sha256/*; do ! gzip -t $$b 2>/dev/null || tar -xzf $$b -C $(BIN)/arm64; done
	qemu-aarch64 $(BIN)/arm64/isthmus version
	qemu-aarch64 $(BIN)/arm64/isthmus genkey >/dev/null
	qemu-aarch64 $(BIN)/arm64/isthmus install --cluster-name a --pod-cidr 10.244.0.0/16 --print | grep -c '^kind: '

.PHONY: test-helm
test-helm: ## Compare the chart as Helm renders it with what isthmus install applies (builds Helm's engine, 2 minutes once)
	go test -C test/helm ./...

.PHONY: test-prometheus
test-prometheus: ## Have Prometheus evaluate the alerts and the queries of the dashboard (builds its engine, a minute once)
	go test -C test/prometheus ./...

.PHONY: test-otel
test-otel: ## Have an OpenTelemetry collector's filelog receiver read the flow log (builds it, a minute once)
	go test -C test/otel ./...

.PHONY: test-coredns
test-coredns: ## Have CoreDNS read the Corefiles that isthmus install writes (builds it, three minutes once)
	go test -C test/coredns ./...

.PHONY: record
record: deps ## Record the metrics of three clusters with traffic and faults, for test-prometheus (root, seven minutes)
	cd test && go test ./fleet -count=1 -run '^TestRecordDashboardData$$' -v -record $(CURDIR)/test/prometheus/testdata/fleet.gz

.PHONY: lint
lint: $(GOLANGCI) ## golangci-lint over both modules; links, words and widths of documents, and subjects of commits
	@go test -count=1 ./internal/pages
	$(GOLANGCI) run --allow-parallel-runners ./...
	cd test && ../$(GOLANGCI) run --allow-parallel-runners --config ../.golangci.yml ./...

# `make test` does not include this target: its result depends on the current database at https://vuln.go.dev.
GOVULNCHECK := $(BIN)/tools/govulncheck
VULNDB      ?= https://vuln.go.dev

.PHONY: vuln
vuln: $(GOVULNCHECK) ## govulncheck over both modules, and the tests of test/: fail on a known vulnerability in called code (needs VULNDB, https://vuln.go.dev)
	@found=0; for m in . test; do \
		rc=0; tests=; [ $$m != test ] || tests=-test; : "nearly all of test/ is tests"; \
		(cd $$m && $(CURDIR)/$(GOVULNCHECK) -db $(VULNDB) $$tests ./...) || rc=$$?; \
		case $$rc in 0) ;; 3) found=3;; *) \
			echo "make vuln: no result for $$m: govulncheck needs the database at $(VULNDB) (VULNDB=file:///PATH takes a copy)"; exit $$rc;; esac; \
	done; exit $$found

$(GOVULNCHECK): internal/tools/go.mod internal/tools/go.sum
	@mkdir -p $(@D)
	go build -C internal/tools -o $(CURDIR)/$@ golang.org/x/vuln/cmd/govulncheck

# The linter is built from a separate module, so its dependencies do not affect those of Isthmus.
$(GOLANGCI): internal/tools/go.mod internal/tools/go.sum
	@echo "building golangci-lint, once (about a minute and a half on two cores)"
	@mkdir -p $(@D)
	go build -C internal/tools -o $(CURDIR)/$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: bench
bench: build deps $(FORK) ## Measure the cost of each step of the data path, then compare with other gateways between pods (root, 25 minutes)
	@go run ./benchmarks/ladder -out benchmarks/ladder.md
	@if [ "$$(id -u)" -ne 0 ]; then echo "the comparison needs root: 'sudo make bench'"; else \
		command -v nebula >/dev/null || apt-get install -y -qq --no-install-recommends nebula >/dev/null || echo "nebula is not installed, so it is not measured"; \
		$(COMPARE) -rounds $(ROUNDS) -out benchmarks; fi

.PHONY: bench-check
bench-check: build deps ## Fail if the ratios to wireguard-go are worse than those recorded in benchmarks/compare.json (root, 2 to 6 minutes)
	@$(COMPARE) -rounds 9 -duration 1s -check benchmarks/compare.json

.PHONY: bench-record
bench-record: build deps ## Add a run to benchmarks/compare.json, from which bench-check knows the normal variation of the ratios (root, 4 minutes)
	@$(COMPARE) -rounds 5 -duration 1s -record benchmarks/compare.json

# The comparison includes Tailscale's fork of wireguard-go, built from a separate module.
$(FORK): benchmarks/tailscale/go.mod benchmarks/tailscale/main.go
	go build -C benchmarks/tailscale -o $(CURDIR)/$@ .

.PHONY: fuzz
fuzz: ## Run each fuzz target of the packages FUZZ (all) for FUZZTIME (30s), and print the coverage
	@test/fuzz.sh $(FUZZTIME) $(FUZZ)

.PHONY: generate
generate: ## Regenerate generated files (deepcopy, CRDs, the IPAM's protocol, reference pages)
	go generate ./...

# The target compares with the files from before, not with git, so uncommitted changes are no error.
.PHONY: generate-check
generate-check: ## Fail if `make generate` would change a file
	@set -e; before=$$(mktemp); after=$$(mktemp); trap 'rm -f "$$before" "$$after"' EXIT; \
	sums() { find . \( -path ./.git -o -path ./$(BIN) \) -prune -o -type f -exec sha256sum {} + | sort -k2; }; \
	sums > "$$before"; $(MAKE) --no-print-directory generate; sums > "$$after"; \
	if ! diff "$$before" "$$after" | sed -n 's/^[<>] [0-9a-f]*  /  /p' | sort -u | grep .; then exit 0; fi; \
	echo "the files above were not up to date: run 'make generate' and commit them"; exit 1

# Each command that tests call, and its Debian package.
COMMANDS := nft:nftables iptables:iptables wireguard-go:wireguard-go turnserver:coturn gcc:gcc tshark:tshark

.PHONY: deps
deps: ## Install missing Debian packages that tests need, if the user is root
	@missing=; for c in $(COMMANDS); do command -v "$${c%%:*}" >/dev/null || missing="$$missing $${c##*:}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
		echo "not installed:$$missing; the tests that need them will be skipped ('sudo make deps' on Debian installs them)"; exit 0; fi; \
	case "$$missing" in *gcc*) missing="$$missing libc6-dev";; esac; \
	case "$$missing" in *coturn*) : "the package starts a server on all addresses unless its unit is masked"; \
		unit=/etc/systemd/system/coturn.service; [ -e $$unit ] || ! [ -d $${unit%/*} ] || ln -sfn /dev/null $$unit;; esac; \
	echo "installing for the tests: apt-get install$$missing"; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null

.PHONY: clean
clean: ## Remove bin/
	rm -rf $(BIN)

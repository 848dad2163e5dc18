module braid

go 1.26.0

require (
	go.etcd.io/etcd/api/v3 v3.7.3
	go.etcd.io/raft/v3 v3.7.0
)

require (
	github.com/cockroachdb/datadriven v1.0.3 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)

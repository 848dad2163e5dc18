//go:build tools

// Package tests pins, through this file, the real etcd programs that the test programs compare
// braid with: package etcdbin builds them from the versions in this module's go.mod.
package tests

import (
	_ "go.etcd.io/etcd/etcdctl/v3"
	_ "go.etcd.io/etcd/server/v3"
)

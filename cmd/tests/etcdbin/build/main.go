// Command build puts etcd, etcdctl and braid into the cache directory and prints where they are.
package main

import (
	"fmt"
	"os"

	"braid/cmd/tests/etcdbin"
)

func main() {
	status := 0
	for _, program := range []struct {
		name  string
		build func() (string, error)
	}{{"etcd", etcdbin.Etcd}, {"etcdctl", etcdbin.Etcdctl}, {"braid", etcdbin.Braid}} {
		path, err := program.build()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 1
			continue
		}
		fmt.Printf("%s %s\n", program.name, path)
	}
	os.Exit(status)
}

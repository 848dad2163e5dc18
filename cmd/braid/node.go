package main

import (
	"context"

	"braid/cmd/internal/config"
	"braid/cmd/internal/node"
)

// startNode assembles and starts the node; tests put something smaller in its place.
var startNode = func(ctx context.Context, cfg *config.Config) (server, error) {
	n, err := node.Start(ctx, cfg)
	if err != nil {
		return nil, err // not n: a nil *Node is not a nil server
	}
	return n, nil
}

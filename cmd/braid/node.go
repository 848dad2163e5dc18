package main

import (
	"context"

	"braid/cmd/internal/config"
	"braid/cmd/internal/node"
)

// startNode is a variable so that tests of the command line need no node.
var startNode = func(ctx context.Context, cfg *config.Config) (server, error) {
	return node.Start(ctx, cfg)
}

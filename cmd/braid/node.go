package main

import (
	"context"
	"errors"

	"braid/cmd/internal/config"
)

var startNode = func(ctx context.Context, cfg *config.Config) (server, error) {
	return nil, errors.New("not assembled yet")
}

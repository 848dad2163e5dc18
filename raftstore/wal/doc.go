// Package wal is the write-ahead log of a store.
package wal

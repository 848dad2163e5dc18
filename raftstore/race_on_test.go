//go:build race

package raftstore

const raceEnabled = true

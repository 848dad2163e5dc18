//go:build !linux

package main

func playStart() {}

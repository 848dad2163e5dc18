package h2

import (
	"encoding/binary"
	"strings"
)

// HTTP/2's frames (RFC 9113, section 6): a head of 9 bytes, which is length (3), type, flags and
// stream (4), and a payload.
const (
	frameHeadBytes = 9

	frameData         = 0
	frameHeaders      = 1
	framePriority     = 2
	frameReset        = 3
	frameSettings     = 4
	framePing         = 6
	frameGoAway       = 7
	frameWindow       = 8
	frameContinuation = 9

	flagEndStream  = 0x1 // data, headers
	flagAck        = 0x1 // settings, ping
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20

	settingTableSize     = 1
	settingStreamsMax    = 3
	settingInitialWindow = 4
	settingFrameSize     = 5
	settingHeaderList    = 6

	codeNone            = 0
	codeProtocol        = 1
	codeFlowControl     = 3
	codeStreamClosed    = 5
	codeFrameSize       = 6
	codeRefused         = 7
	codeCancel          = 8
	codeCompression     = 9
	codeEnhanceYourCalm = 11

	// frameBytesMax is what we accept and, unless the peer wants less, send; every endpoint must
	// take that much.
	frameBytesMax = 16 << 10
	windowDefault = 65535
	windowMax     = 1<<31 - 1
)

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

type frameHead struct {
	length uint32
	kind   byte
	flags  byte
	stream uint32
}

func parseHead(b []byte) frameHead {
	return frameHead{
		length: uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2]), kind: b[3], flags: b[4],
		stream: binary.BigEndian.Uint32(b[5:]) & (1<<31 - 1),
	}
}

func appendHead(b []byte, length int, kind, flags byte, stream uint32) []byte {
	b = append(b, byte(length>>16), byte(length>>8), byte(length), kind, flags)
	return binary.BigEndian.AppendUint32(b, stream)
}

func appendSettings(b []byte, pairs ...[2]uint32) []byte {
	b = appendHead(b, 6*len(pairs), frameSettings, 0, 0)
	for _, p := range pairs {
		b = binary.BigEndian.AppendUint16(b, uint16(p[0]))
		b = binary.BigEndian.AppendUint32(b, p[1])
	}
	return b
}

func appendWindow(b []byte, stream, n uint32) []byte {
	return binary.BigEndian.AppendUint32(appendHead(b, 4, frameWindow, 0, stream), n)
}

func appendReset(b []byte, stream, code uint32) []byte {
	return binary.BigEndian.AppendUint32(appendHead(b, 4, frameReset, 0, stream), code)
}

func appendPing(b []byte, flags byte, data []byte) []byte {
	return append(appendHead(b, 8, framePing, flags, 0), data...)
}

func appendGoAway(b []byte, last, code uint32, text string) []byte {
	b = appendHead(b, 8+len(text), frameGoAway, 0, 0)
	b = binary.BigEndian.AppendUint32(b, last)
	b = binary.BigEndian.AppendUint32(b, code)
	return append(b, text...)
}

// unpad takes padding, and the priority of a headers frame, off a payload.
func unpad(h frameHead, p []byte) ([]byte, bool) {
	pad := 0
	if h.flags&flagPadded != 0 {
		if len(p) == 0 {
			return nil, false
		}
		pad, p = int(p[0]), p[1:]
	}
	if h.kind == frameHeaders && h.flags&flagPriority != 0 {
		if len(p) < 5 {
			return nil, false
		}
		p = p[5:]
	}
	if pad > len(p) {
		return nil, false
	}
	return p[:len(p)-pad], true
}

// escapeMessage encodes grpc-message: printable ASCII but '%' stays, all else is %XX.
func escapeMessage(s string) string {
	plain := true
	for i := 0; i < len(s); i++ {
		if s[i] < ' ' || s[i] > '~' || s[i] == '%' {
			plain = false
			break
		}
	}
	if plain {
		return s
	}
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < ' ' || c > '~' || c == '%' {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

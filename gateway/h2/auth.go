package h2

import (
	"crypto/tls"
	"net"

	"google.golang.org/grpc/credentials"
)

// authInfo tells handlers about TLS that has been negotiated already.
func authInfo(nc net.Conn) credentials.AuthInfo {
	tc, ok := nc.(*tls.Conn)
	if !ok {
		return plainInfo{}
	}
	return credentials.TLSInfo{
		State:          tc.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}
}

// plainInfo says that there is none.
type plainInfo struct{}

func (plainInfo) AuthType() string { return "insecure" }

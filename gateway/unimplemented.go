package gateway

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The services of this file are registered, so that clients learn what is missing by name.

// unavailable is the answer of what does not exist yet.
func unavailable(what string) error {
	return status.Errorf(codes.Unimplemented, "braid: %s is not available yet", what)
}

// unknownService answers for services that are not registered at all.
func unknownService(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	return status.Errorf(codes.Unimplemented, "braid: there is no method %s", method)
}

type authServer struct {
	s *Server
	pb.UnsafeAuthServer
}

func (authServer) AuthEnable(context.Context, *pb.AuthEnableRequest) (*pb.AuthEnableResponse, error) {
	return nil, unavailable("Auth.AuthEnable")
}

func (authServer) AuthDisable(context.Context, *pb.AuthDisableRequest) (*pb.AuthDisableResponse, error) {
	return nil, unavailable("Auth.AuthDisable")
}

// authRevision is that of an etcd whose users and roles were never changed.
const authRevision = 1

// AuthStatus answers what etcd answers while authentication is off, as it is as long as nothing can
// enable it.
func (a authServer) AuthStatus(context.Context, *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	return &pb.AuthStatusResponse{Header: a.s.header.local(), AuthRevision: authRevision}, nil
}

// Authenticate answers what etcd answers while authentication is off. Clients that were given a name
// and a password ask first of all, and go on without a token only after this error.
func (authServer) Authenticate(context.Context, *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	return nil, rpctypes.ErrGRPCAuthNotEnabled
}

func (authServer) UserAdd(context.Context, *pb.AuthUserAddRequest) (*pb.AuthUserAddResponse, error) {
	return nil, unavailable("Auth.UserAdd")
}

func (authServer) UserGet(context.Context, *pb.AuthUserGetRequest) (*pb.AuthUserGetResponse, error) {
	return nil, unavailable("Auth.UserGet")
}

func (authServer) UserList(context.Context, *pb.AuthUserListRequest) (*pb.AuthUserListResponse, error) {
	return nil, unavailable("Auth.UserList")
}

func (authServer) UserDelete(context.Context, *pb.AuthUserDeleteRequest) (*pb.AuthUserDeleteResponse, error) {
	return nil, unavailable("Auth.UserDelete")
}

func (authServer) UserChangePassword(context.Context, *pb.AuthUserChangePasswordRequest) (*pb.AuthUserChangePasswordResponse, error) {
	return nil, unavailable("Auth.UserChangePassword")
}

func (authServer) UserGrantRole(context.Context, *pb.AuthUserGrantRoleRequest) (*pb.AuthUserGrantRoleResponse, error) {
	return nil, unavailable("Auth.UserGrantRole")
}

func (authServer) UserRevokeRole(context.Context, *pb.AuthUserRevokeRoleRequest) (*pb.AuthUserRevokeRoleResponse, error) {
	return nil, unavailable("Auth.UserRevokeRole")
}

func (authServer) RoleAdd(context.Context, *pb.AuthRoleAddRequest) (*pb.AuthRoleAddResponse, error) {
	return nil, unavailable("Auth.RoleAdd")
}

func (authServer) RoleGet(context.Context, *pb.AuthRoleGetRequest) (*pb.AuthRoleGetResponse, error) {
	return nil, unavailable("Auth.RoleGet")
}

func (authServer) RoleList(context.Context, *pb.AuthRoleListRequest) (*pb.AuthRoleListResponse, error) {
	return nil, unavailable("Auth.RoleList")
}

func (authServer) RoleDelete(context.Context, *pb.AuthRoleDeleteRequest) (*pb.AuthRoleDeleteResponse, error) {
	return nil, unavailable("Auth.RoleDelete")
}

func (authServer) RoleGrantPermission(context.Context, *pb.AuthRoleGrantPermissionRequest) (*pb.AuthRoleGrantPermissionResponse, error) {
	return nil, unavailable("Auth.RoleGrantPermission")
}

func (authServer) RoleRevokePermission(context.Context, *pb.AuthRoleRevokePermissionRequest) (*pb.AuthRoleRevokePermissionResponse, error) {
	return nil, unavailable("Auth.RoleRevokePermission")
}

package admin

import (
	"bytes"
	"context"

	"google.golang.org/grpc"

	"braid/cmd/internal/admin/adminpb"
)

// Client calls the service over a connection; it is a Backend itself, whose errors are gRPC's.
type Client struct{ rpc adminpb.AdminClient }

// NewClient uses conn, which stays the caller's to close.
func NewClient(conn grpc.ClientConnInterface) *Client {
	return &Client{rpc: adminpb.NewAdminClient(conn)}
}

// Regions is Backend.Regions.
func (c *Client) Regions(ctx context.Context, from []byte, limit int) ([]Region, bool, error) {
	resp, err := c.rpc.ListRegions(ctx, &adminpb.ListRegionsRequest{From: from, Limit: uint32(min(max(limit, 0), pageMax))})
	if err != nil {
		return nil, false, err
	}
	rs := make([]Region, len(resp.GetRegions()))
	for i, w := range resp.GetRegions() {
		rs[i] = regionFromWire(w)
	}
	return rs, resp.GetMore(), nil
}

// EachRegion calls fn with every region in key order, a page at a time, until fn fails.
func (c *Client) EachRegion(ctx context.Context, fn func(*Region) error) error {
	var from []byte
	for {
		rs, more, err := c.Regions(ctx, from, 0)
		if err != nil {
			return err
		}
		for i := range rs {
			if err := fn(&rs[i]); err != nil {
				return err
			}
		}
		// A page that does not move on would be asked for again and again.
		if !more || len(rs) == 0 || bytes.Compare(rs[len(rs)-1].End, from) <= 0 {
			return nil
		}
		from = rs[len(rs)-1].End
	}
}

// TransferRegion is Backend.TransferRegion.
func (c *Client) TransferRegion(ctx context.Context, region, store uint64) error {
	_, err := c.rpc.TransferRegion(ctx, &adminpb.TransferRegionRequest{Region: region, Store: store})
	return err
}

// PD is Backend.PD.
func (c *Client) PD(ctx context.Context) (PD, error) {
	resp, err := c.rpc.PDStatus(ctx, &adminpb.PDStatusRequest{})
	if err != nil {
		return PD{}, err
	}
	return pdFromWire(resp), nil
}

// TransferPD is Backend.TransferPD.
func (c *Client) TransferPD(ctx context.Context, store uint64) error {
	_, err := c.rpc.TransferPD(ctx, &adminpb.TransferPDRequest{Store: store})
	return err
}

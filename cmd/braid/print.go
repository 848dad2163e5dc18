package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"braid/cmd/internal/admin"
)

// storeNames maps store ids to names.
type storeNames map[uint64]string

func names(pd *admin.PD) storeNames {
	m := storeNames{}
	for _, s := range pd.Stores {
		if s.Name != "" {
			m[s.ID] = s.Name
		}
	}
	return m
}

// of is the name of a store, its id when it has none, "-" for no store.
func (m storeNames) of(id uint64) string {
	if n, ok := m[id]; ok {
		return n
	}
	if id == 0 {
		return "-"
	}
	return fmt.Sprintf("%x", id)
}

// keyWidthMax bounds a key in a table; JSON has the whole key.
const keyWidthMax = 40

func printKey(k []byte, none string) string {
	if len(k) == 0 {
		return none
	}
	s := fmt.Sprintf("%q", k)
	if len(s) > keyWidthMax {
		s = s[:keyWidthMax-3] + "..."
	}
	return s
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table prints rows under a heading, aligned.
func table(w io.Writer, heading string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, strings.ReplaceAll(heading, " ", "\t"))
	for _, r := range rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

func printRegions(w io.Writer, format string, rs []admin.Region, n storeNames) error {
	if format == "json" {
		type peer struct {
			Replica uint64 `json:"replica"`
			Store   uint64 `json:"store"`
		}
		type region struct {
			ID            uint64 `json:"id"`
			Start         []byte `json:"startKey"`
			End           []byte `json:"endKey"` // null: no upper bound
			Epoch         uint64 `json:"epoch"`
			Incarnation   uint32 `json:"incarnation"`
			Peers         []peer `json:"peers"`
			Leader        uint64 `json:"leaderStore"`
			Term          uint64 `json:"term"`
			AppliedIndex  uint64 `json:"appliedIndex"`
			Revision      int64  `json:"revision"`
			ItemsRetained uint64 `json:"itemsRetained"`
		}
		out := make([]region, len(rs))
		for i, r := range rs {
			peers := make([]peer, len(r.Peers))
			for j, p := range r.Peers {
				peers[j] = peer(p)
			}
			out[i] = region{r.ID, r.Start, r.End, r.Epoch, r.Incarnation, peers, r.LeaderStore, r.Term, r.AppliedIndex, r.Revision, r.ItemsRetained}
		}
		return printJSON(w, struct {
			Regions []region `json:"regions"`
		}{out})
	}
	rows := make([][]string, len(rs))
	for i, r := range rs {
		peers := make([]string, len(r.Peers))
		for j, p := range r.Peers {
			peers[j] = n.of(p.Store)
		}
		rows[i] = []string{fmt.Sprint(r.ID), printKey(r.Start, "(first)"), printKey(r.End, "(end)"), n.of(r.LeaderStore), strings.Join(peers, ","),
			fmt.Sprint(r.Epoch), fmt.Sprint(r.Term), fmt.Sprint(r.AppliedIndex), fmt.Sprint(r.Revision), fmt.Sprint(r.ItemsRetained)}
	}
	return table(w, "REGION START END LEADER REPLICAS EPOCH TERM APPLIED REVISION RETAINED", rows)
}

func printPD(w io.Writer, format string, pd *admin.PD) error {
	mode := "multi-group"
	if pd.SingleGroup {
		mode = "single-group"
	}
	if format == "json" {
		type store struct {
			ID         uint64   `json:"id"`
			Name       string   `json:"name"`
			PeerURLs   []string `json:"peerURLs"`
			ClientURLs []string `json:"clientURLs"`
			PDVoter    bool     `json:"pdVoter"`
			Alive      bool     `json:"alive"`
		}
		stores := make([]store, len(pd.Stores))
		for i, s := range pd.Stores {
			stores[i] = store(s)
		}
		return printJSON(w, struct {
			ClusterID       uint64  `json:"clusterID"`
			Mode            string  `json:"mode"`
			Leader          uint64  `json:"leaderStore"`
			Term            uint64  `json:"term"`
			AppliedIndex    uint64  `json:"appliedIndex"`
			Cut             uint64  `json:"cut"`
			Revision        int64   `json:"revision"`
			CompactRevision int64   `json:"compactRevision"`
			Fence           uint64  `json:"fence"`
			Regions         uint64  `json:"regions"`
			ItemsRetained   uint64  `json:"itemsRetained"`
			Stores          []store `json:"stores"`
		}{pd.ClusterID, mode, pd.LeaderStore, pd.Term, pd.AppliedIndex, pd.Cut, pd.Revision, pd.CompactRevision, pd.Fence, pd.Regions, pd.ItemsRetained, stores})
	}
	n := names(pd)
	if err := table(w, "CLUSTER MODE LEADER TERM APPLIED CUT REVISION COMPACTED FENCE REGIONS RETAINED", [][]string{{
		fmt.Sprintf("%x", pd.ClusterID), mode, n.of(pd.LeaderStore), fmt.Sprint(pd.Term), fmt.Sprint(pd.AppliedIndex), fmt.Sprint(pd.Cut),
		fmt.Sprint(pd.Revision), fmt.Sprint(pd.CompactRevision), fmt.Sprint(pd.Fence), fmt.Sprint(pd.Regions), fmt.Sprint(pd.ItemsRetained)}}); err != nil {
		return err
	}
	fmt.Fprintln(w)
	rows := make([][]string, len(pd.Stores))
	for i, s := range pd.Stores {
		rows[i] = []string{fmt.Sprintf("%x", s.ID), s.Name, fmt.Sprint(s.Alive), fmt.Sprint(s.PDVoter), strings.Join(s.PeerURLs, ","), strings.Join(s.ClientURLs, ",")}
	}
	return table(w, "STORE NAME ALIVE PD-VOTER PEER-URLS CLIENT-URLS", rows)
}

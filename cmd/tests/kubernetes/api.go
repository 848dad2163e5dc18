package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// object is a Kubernetes object as JSON has it.
type object = map[string]any

// api talks to a kube-apiserver in plain JSON, so that this module does not need Kubernetes' client.
type api struct {
	url    string // https://host:port
	client *http.Client
}

const (
	token = "admintoken"
	// askTimeout bounds a request that is not a watch.
	askTimeout = 30 * time.Second
)

func newAPI(addr string) *api {
	// kube-apiserver makes its own certificate, which nobody has signed.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	return &api{url: "https://" + addr, client: &http.Client{Transport: transport}}
}

// statusError is an answer other than 2xx.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return fmt.Sprintf("%d %s", e.code, e.text) }

// isStatus says whether err is an answer with one of the codes.
func isStatus(err error, codes ...int) bool {
	var s *statusError
	if !errors.As(err, &s) {
		return false
	}
	for _, c := range codes {
		if s.code == c {
			return true
		}
	}
	return false
}

func (a *api) send(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // only for people
		return nil, fmt.Errorf("%s %s: %w", method, path, &statusError{resp.StatusCode, string(text)})
	}
	return resp, nil
}

// do sends in, if it is not nil, and decodes the answer into out, if that is not nil.
func (a *api) do(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := a.send(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// text is the answer to a GET as it came.
func (a *api) text(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := a.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return string(data), err
}

// meta is what is read of every object.
type meta struct {
	Name              string `json:"name"`
	Namespace         string `json:"namespace"`
	UID               string `json:"uid"`
	ResourceVersion   string `json:"resourceVersion"`
	DeletionTimestamp string `json:"deletionTimestamp"`
}

// pod is what is read of a pod.
type pod struct {
	Metadata meta `json:"metadata"`
	Spec     struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// list is a list of anything that is read as T.
type list[T any] struct {
	Metadata meta `json:"metadata"`
	Items    []T  `json:"items"`
}

// watch calls f with every event at path (which has a resourceVersion) until the server ends the
// watch, f returns an error, or ctx ends.
func (a *api) watch(ctx context.Context, path string, f func(kind string, p pod) error) error {
	resp, err := a.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for d := json.NewDecoder(resp.Body); ; {
		var event struct {
			Type   string `json:"type"`
			Object pod    `json:"object"`
		}
		if err := d.Decode(&event); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := f(event.Type, event.Object); err != nil {
			return err
		}
	}
}

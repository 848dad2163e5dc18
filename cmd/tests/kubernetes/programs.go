package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"braid/cmd/tests/proc"
)

// program is a running part of Kubernetes: a process with a log. It is killed, never asked to stop,
// since kube-apiserver does not end while its store is away. Owned by who launched it.
type program struct {
	name    string
	logPath string
	cmd     *exec.Cmd
	exited  chan struct{} // closed after err was set
	err     error
}

// launch starts bin with its output in dir/name.log.
func launch(dir, name, bin string, env []string, args ...string) (*program, error) {
	p := &program{name: name, logPath: filepath.Join(dir, name+".log"), exited: make(chan struct{})}
	log, err := os.Create(p.logPath)
	if err != nil {
		return nil, err
	}
	p.cmd = exec.Command(bin, args...)
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, log, log
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		log.Close()
		return nil, err
	}
	go func() {
		p.err = errors.Join(p.cmd.Wait(), log.Close())
		close(p.exited)
	}()
	return p, nil
}

// alive is nil while the process runs.
func (p *program) alive() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended (%v): %s", p.name, p.err, p.logPath)
	default:
		return nil
	}
}

// kill ends the process and waits for its end.
func (p *program) kill() error {
	if p.alive() != nil {
		return nil
	}
	err := p.cmd.Process.Kill()
	<-p.exited
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// control is a kube-apiserver and whatever runs on it.
type control struct {
	api      *api
	dir      string
	programs []*program
}

// startAPI runs a kube-apiserver on the store and waits until it is ready.
func startAPI(ctx context.Context, o options, endpoints []string, env ...string) (c *control, err error) {
	if o.programs == "" {
		return nil, errors.New("-programs names no folder with kube-apiserver")
	}
	c = &control{dir: filepath.Join(o.dir, "control")}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return nil, err
	}
	if err := writeKeys(c.dir); err != nil {
		return nil, err
	}
	addrs, err := proc.FreeAddrs(1)
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(addrs[0])
	if err != nil {
		return nil, err
	}
	c.api = newAPI(addrs[0])
	err = c.launch(o, "kube-apiserver", env,
		"--etcd-servers="+urls(endpoints), "--bind-address="+host, "--secure-port="+port,
		"--advertise-address=192.0.2.1", // may not be a loopback; nothing dials it
		"--cert-dir="+c.dir, "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+filepath.Join(c.dir, "sa.pub"), "--service-account-signing-key-file="+filepath.Join(c.dir, "sa.key"),
		"--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=AlwaysAllow",
		"--token-auth-file="+filepath.Join(c.dir, "tokens.csv"), "--disable-admission-plugins=ServiceAccount",
		"--etcd-compaction-interval=20s")
	if err != nil {
		return nil, err
	}
	ready, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	err = proc.Poll(ready, 200*time.Millisecond, func() (bool, error) {
		text, err := c.api.text(ready, "/readyz")
		return err == nil && text == "ok", c.alive()
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("kube-apiserver is not ready: %w", err), c.stop())
	}
	return c, nil
}

func (c *control) launch(o options, name string, env []string, args ...string) error {
	bin, err := filepath.Abs(filepath.Join(o.programs, name))
	if err != nil {
		return err
	}
	p, err := launch(c.dir, name, bin, env, args...)
	if err == nil {
		c.programs = append(c.programs, p)
	}
	return err
}

// startControllers runs a controller-manager and a scheduler.
func (c *control) startControllers(o options) error {
	config := filepath.Join(c.dir, "kubeconfig")
	err := writeJSON(config, object{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": []object{{"name": "c", "cluster": object{"server": c.api.url, "insecure-skip-tls-verify": true}}},
		"users":    []object{{"name": "u", "user": object{"token": token}}},
		"contexts": []object{{"name": "c", "context": object{"cluster": "c", "user": "u"}}},
	})
	if err != nil {
		return err
	}
	return errors.Join(
		c.launch(o, "kube-controller-manager", nil, "--kubeconfig="+config, "--secure-port=0", "--leader-elect=true",
			"--service-account-private-key-file="+filepath.Join(c.dir, "sa.key")),
		c.launch(o, "kube-scheduler", nil, "--kubeconfig="+config, "--secure-port=0"))
}

// alive is nil while all programs run.
func (c *control) alive() error {
	var errs []error
	for _, p := range c.programs {
		errs = append(errs, p.alive())
	}
	return errors.Join(errs...)
}

// stop kills all programs, the last first.
func (c *control) stop() error {
	var errs []error
	for i := range c.programs {
		errs = append(errs, c.programs[len(c.programs)-1-i].kill())
	}
	return errors.Join(errs...)
}

// urls writes client addresses as --etcd-servers takes them.
func urls(endpoints []string) string {
	var all []string
	for _, e := range endpoints {
		all = append(all, "http://"+e)
	}
	return strings.Join(all, ",")
}

// writeKeys writes the key that service accounts are signed with, and the file of tokens.
func writeKeys(dir string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	write := func(name string, data []byte) error { return os.WriteFile(filepath.Join(dir, name), data, 0o600) }
	return errors.Join(
		write("sa.key", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		write("sa.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})),
		write("tokens.csv", []byte(token+",admin,1,system:masters\n")))
}

func writeJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

#!/bin/bash
# Runs in a booted root, the Debian system that test_booted_root.py makes: first a job on a local cluster, then the
# systemd units of the server and of the agent. If all succeed, the last printed line is "proved".
set -euxo pipefail
export PATH=/opt/everstep/bin:$PATH HOME=/root
cd /root

# within SECONDS CONDITION: wait at most SECONDS until the shell command CONDITION succeeds.
within() {
  for _ in $(seq "$1"); do
    if eval "$2"; then
      return
    fi
    sleep 1
  done
  return 1
}

# Run a job on a local cluster, whose server and agents come from the wheel.
everstep local up --nodes 2 --spares 0 --node-memory-mib 256
eval "$(everstep local env)"
everstep jobs submit --name proof --source-dir /srv/job --entry-point elastic.py --node-count 2 --copies 2
everstep jobs wait proof

# Start the server's unit. It uses the local cluster's AWS.
install -o everstep -m 600 "$(find ~root/.everstep -name keys.json)" /etc/everstep/keys
cat >/etc/everstep/server.env <<END
EVERSTEP_MODE=local
EVERSTEP_AWS_ENDPOINT_URL=$AWS_ENDPOINT_URL
EVERSTEP_AWS_KEYS_FILE=/etc/everstep/keys
EVERSTEP_BUCKET=everstep-local
SERVER_OPTIONS=--port 19443
END
chown everstep /etc/everstep
systemctl start everstep-server
systemctl is-active everstep-server

# Start the agent's unit. The agent's join token is wrong, so the agent waits for another token, but it starts its shim.
cat >/etc/everstep/agent.env <<END
EVERSTEP_INSTANCE_ID=i-1
EVERSTEP_ADDRESS=127.0.0.1
EVERSTEP_JOIN_TOKEN=wrong
EVERSTEP_NODE_MEMORY_BYTES=100000000
AGENT_OPTIONS=--control-plane-url http://127.0.0.1:19443
END
mkdir -p /etc/systemd/system/everstep-agent.service.d
printf '[Service]\nWatchdogSec=4s\nTimeoutAbortSec=2s\n' >/etc/systemd/system/everstep-agent.service.d/fast.conf
systemctl daemon-reload
systemctl start everstep-agent
systemctl is-active everstep-agent everstep-storage
test -e /run/everstep/gate-passed
scope=$(systemctl list-units --plain --no-legend 'everstep-ranks-*.scope' | cut -d' ' -f1)
[ "$(systemctl show -P Slice "$scope")" = everstep-ranks.slice ]
shim=$(systemctl show -P ControlGroup "$scope")
within 60 "journalctl -u everstep-agent | grep -q 'ranks run in cgroups below .*$shim'"

# A restart of the agent's unit keeps the shim and its scope. If the agent is stopped by a signal, the watchdog restarts
# it.
first_process() {
  cat "/sys/fs/cgroup/unified$shim/cgroup.procs" "/sys/fs/cgroup$shim/cgroup.procs" 2>/dev/null | sort -n | head -1 || true
}
before=$(first_process)
[ -n "$before" ]
systemctl restart everstep-agent
[ "$before" = "$(first_process)" ]
systemctl is-active everstep-agent
systemctl kill --kill-who=main --signal=STOP everstep-agent
within 60 '[ "$(systemctl show -P NRestarts everstep-agent)" = 1 ]'
everstep local down
echo proved

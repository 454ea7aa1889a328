#!/bin/sh
# Turns the root of a Debian, Ubuntu or Amazon Linux system into a node or a server of Everstep.
#
#   install.sh node|server WHEEL [--gpu]
#
# --gpu also installs NVIDIA's driver, its fabric manager and EFA, in the versions of versions.env (Debian, Ubuntu).
# The script runs on an instance or in a chroot, and may run again: it then installs the given wheel. It enables the
# unit and starts nothing. Before the start, write /etc/everstep/agent.env or /etc/everstep/server.env (docs/operating.md).
set -eu

fail() {
  echo "install.sh: $*" >&2
  exit 1
}

role=${1:-}
wheel=${2:-}
gpu=${3:-}
: "${PIP_EXTRA_INDEX_URL:=}"
here=$(cd "$(dirname "$0")" && pwd)
prefix=/opt/everstep
. "$here/versions.env"
. /etc/os-release

case $role in
node)
  # DeepSpeed compiles its optimizer on the first use.
  units="agent storage"
  deb_packages="iproute2 mdadm e2fsprogs util-linux g++ python3-dev"
  rpm_packages="iproute mdadm e2fsprogs util-linux gcc-c++"
  ;;
server)
  # `everstep db` calls pg_dump and pg_restore. A restore also needs psql, to create an empty database.
  units=server
  deb_packages=postgresql-client
  rpm_packages=postgresql16
  ;;
*) fail "the first argument is '$role'; use node or server" ;;
esac
[ -z "$gpu" ] || [ "$gpu" = --gpu ] || fail "the third argument is '$gpu'; use --gpu or nothing"
[ -f "$wheel" ] || fail "the wheel '$wheel' does not exist; 'make wheel' builds one in dist/"
[ "$(id -u)" = 0 ] || fail "run this script as root"
[ "$(uname -m)" = x86_64 ] || fail "nodes need x86_64 processors; this machine has $(uname -m)"

install_packages() {
  if command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # Ubuntu updates itself after the first boot, and holds apt's lock meanwhile.
    apt-get -o DPkg::Lock::Timeout=600 update -q
    apt-get -o DPkg::Lock::Timeout=600 install -q -y --no-install-recommends "$@"
  elif command -v dnf >/dev/null; then
    dnf install -q -y "$@"
  else
    fail "this system has neither apt-get nor dnf"
  fi
}

find_python() {
  for name in python3.13 python3.12 python3.11 python3; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$name"
      return
    fi
  done
}

install_system() {
  if command -v dnf >/dev/null; then
    # Amazon Linux has Python 3.9 as python3.
    # shellcheck disable=SC2086
    install_packages python3.11 python3.11-devel $rpm_packages
  else
    # shellcheck disable=SC2086
    install_packages ca-certificates python3 python3-venv $deb_packages
  fi
  python=$(find_python)
  [ -n "$python" ] || fail "$PRETTY_NAME has no Python 3.11 or newer; use Debian 12, Ubuntu 24.04 or Amazon Linux 2023"
}

# pip_install ARGUMENT…: run pip without its checks for newer versions.
pip_install() {
  "$prefix/bin/pip" install --quiet --disable-pip-version-check --no-deps "$@"
}

install_wheel() {
  "$python" -m venv "$prefix"
  lock=$here/$role.txt
  if [ "$role$gpu" = node ]; then
    # The index of torch's CPU builds has other files under the same version, so the lock has no hash of them.
    lock=$prefix/cpu.txt
    awk '/^[a-z]/ { skip = /^(torch|triton|cuda-|nvidia-)/ && !/^nvidia-ml-py=/ } !skip' "$here/node.txt" >"$lock"
  fi
  pip_install --require-hashes -r "$here/build.txt"
  pip_install --require-hashes --no-build-isolation -r "$lock"
  if [ "$role$gpu" = node ]; then
    # A mirror that PIP_EXTRA_INDEX_URL names takes the place of torch's index.
    [ -n "$PIP_EXTRA_INDEX_URL" ] || set -- --extra-index-url https://download.pytorch.org/whl/cpu
    pip_install --constraint "$here/constraints.txt" "$@" torch
  fi
  # pip skips a wheel whose version is already installed.
  pip_install --no-index --force-reinstall "$wheel"
  # The first start of a process must not compile, and ranks may not write here.
  "$prefix/bin/python" -m compileall -q "$prefix/lib" >/dev/null || true
}

# fetch_key URL FILE FINGERPRINT: download a public key. Fail if the file has another key, or a second one.
fetch_key() {
  curl -fsSL -o "$2" "$1"
  found=$(gpg --batch --show-keys --with-colons "$2" |
    awk -F: '$1 == "pub" { n++ } $1 == "fpr" && !key { key = $10 } END { print n, key }')
  [ "$found" = "1 $3" ] || fail "$1 is not the key $3 of versions.env"
}

# fetch_signed URL FILE KEY: download a file and its signature. Fail unless the key has signed the file.
fetch_signed() {
  curl -fsSL -o "$2" "$1"
  curl -fsSL -o "$2.sig" "$1.sig"
  gpg --batch --yes --dearmor -o "$3.gpg" "$3"
  gpgv --quiet --keyring "$3.gpg" "$2.sig" "$2" || fail "the signature of $1 is wrong"
}

install_gpu() {
  command -v apt-get >/dev/null || fail "--gpu supports Debian and Ubuntu; on Amazon Linux use an AMI with the driver"
  repository=https://developer.download.nvidia.com/compute/cuda/repos/$(echo "$ID$VERSION_ID" | tr -d .)/x86_64
  install_packages curl gnupg gpgv "linux-headers-$(uname -r)"
  work=$(mktemp -d)
  fetch_key "$repository/3bf863cc.pub" "$work/nvidia.asc" "$NVIDIA_KEY"
  install -m 0644 "$work/nvidia.asc" /usr/share/keyrings/nvidia-cuda.asc
  echo "deb [signed-by=/usr/share/keyrings/nvidia-cuda.asc] $repository/ /" >/etc/apt/sources.list.d/nvidia-cuda.list
  printf 'Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n' >/etc/apt/preferences.d/nvidia-cuda
  install_packages "nvidia-driver-pinning-$NVIDIA_DRIVER"
  install_packages nvidia-open nvidia-fabricmanager nvidia-persistenced nvidia-modprobe
  efa=https://efa-installer.amazonaws.com
  fetch_key "$efa/aws-efa-installer.key" "$work/efa.asc" "$EFA_KEY"
  fetch_signed "$efa/aws-efa-installer-$EFA_INSTALLER.tar.gz" "$work/efa.tar.gz" "$work/efa.asc"
  tar -xzf "$work/efa.tar.gz" -C "$work"
  # Kernel module, libfabric and aws-ofi-nccl, as in step 5 of
  # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html. --minimal would omit libfabric
  # (efa-start.html there). AWS documents no option that omits only MPI, so --mpi installs one MPI instead of two.
  # --no-verify (efa-installer-containers.html) skips the test of the EFA card, which needs a security group for EFA.
  (cd "$work/aws-efa-installer" && ./efa_installer.sh -y --mpi=openmpi5 --no-verify)
  rm -rf "$work"
  systemctl enable nvidia-persistenced.service nvidia-fabricmanager.service
  check_gpu
}

check_gpu() {
  # The image boots the newest kernel, which Ubuntu's own updates may have installed after the start of this one.
  kernel=$(find /lib/modules -mindepth 1 -maxdepth 1 -type d | sed 's,.*/,,' | sort -V | tail -n 1)
  module=$(modinfo -k "$kernel" -F version nvidia) ||
    fail "kernel $kernel has no driver; use another NVIDIA_DRIVER in versions.env, or an AMI with an older kernel"
  [ "$module" = "$NVIDIA_DRIVER" ] || fail "the driver has version $module; versions.env names $NVIDIA_DRIVER"
  nv-fabricmanager --version | grep -qF "$NVIDIA_DRIVER" || fail "the fabric manager's version differs from $module"
  /opt/amazon/efa/bin/fi_info --version >/dev/null || fail "the EFA installer left no libfabric in /opt/amazon/efa"
  find /opt/amazon -name 'libnccl-net*.so' | grep -q . || fail "the EFA installer left no aws-ofi-nccl in /opt/amazon"
  # NCCL opens the plugin by name. Without it, NCCL uses TCP and says so only in its debug log.
  ldconfig -p | grep -q libnccl-net || fail "the dynamic linker does not find aws-ofi-nccl; see /etc/ld.so.conf.d"
}

install_units() {
  install -d -m 0700 /etc/everstep
  install -d /etc/systemd/system "$prefix/libexec"
  install -m 0755 "$here"/libexec/* "$prefix/libexec/"
  case $role in
  node)
    getent passwd everstep-ranks >/dev/null || useradd --system --no-create-home everstep-ranks
    cp -R "$here"/units/everstep-ranks* /etc/systemd/system/
    ;;
  server)
    getent passwd everstep >/dev/null || useradd --system --home-dir /var/lib/everstep --no-create-home everstep
    ;;
  esac
  for unit in $units; do
    install -m 0644 "$here/units/everstep-$unit.service" /etc/systemd/system/
    systemctl enable "everstep-$unit.service"
  done
  if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
  fi
}

install_system
install_wheel
[ -z "$gpu" ] || install_gpu
install_units
echo "installed $("$prefix/bin/everstep" --version) as a $role"

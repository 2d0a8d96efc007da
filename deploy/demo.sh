#!/bin/sh
# The demo federation: builds the image, starts a coordinator and three hospitals, runs every method, copies the run folders
# to DEMO_OUT and stops everything again. `make demo-compose` calls it.
# IMAGE, BASE, TORCH, TORCH_INDEX: see deploy/Dockerfile. BUILD_NETWORK: of the build, such as host.
# KEEP=1 leaves it running. METHODS: names of methods, or chain.
# ENGINE: docker or podman; without it, Docker if its engine runs, else Podman. COMPOSE: the compose command to use.
set -eu
cd "$(dirname "$0")/.."
IMAGE=${IMAGE:-fedsurrogate:demo} DEMO_OUT=${DEMO_OUT:-runs/demo}
METHODS=${METHODS:-"fedpft chain fedlap dpcvae fedavg"}
export IMAGE

missing() { echo "demo-compose needs $1: $2" >&2; exit 1; }
if [ -z "${ENGINE:-}" ]; then
    if docker info >/dev/null 2>&1; then ENGINE=docker
    elif podman info >/dev/null 2>&1; then ENGINE=podman
    elif command -v docker >/dev/null; then missing "a running Docker engine" "start it, or add yourself to the group docker"
    else missing "docker or podman" "install Docker Engine, https://docs.docker.com/engine/install"
    fi
fi
if [ -z "${COMPOSE:-}" ]; then
    for COMPOSE in "$ENGINE compose" "$ENGINE-compose" podman-compose ""; do
        $COMPOSE version >/dev/null 2>&1 && break
    done
    [ -n "$COMPOSE" ] || missing "$ENGINE-compose" "install the compose plugin or docker-compose 1.29; with Podman, podman-compose"
fi
echo "engine: $ENGINE, compose: $COMPOSE"
begun=$(date +%s)
minutes() { echo "$((($(date +%s) - begun + 59) / 60)) min so far"; }
if $ENGINE image inspect "$IMAGE" >/dev/null 2>&1; then
    echo "the image $IMAGE is there, and is used as it is; to build it anew: $ENGINE rmi $IMAGE"
else
    echo "the image $IMAGE is built first: 5 to 10 minutes on two cores, once, and 0.7 GB to download. Kept for later builds: the layer of all"
    echo "packages, as long as requirements.lock is the same. Not downloaded: wheels in deploy/wheels, such as those of make airgap"
fi
echo "then a minute to start, and about a minute for each method on two cores: $METHODS (METHODS=fedpft runs one)"
compose() { $COMPOSE -p fedsurrogate-demo -f deploy/compose.demo.yml "$@"; }

if ! $ENGINE image inspect "$IMAGE" >/dev/null 2>&1; then
    # The bundled digits need no backbone.
    set -- --build-arg BACKBONES=no
    for name in BASE TORCH TORCH_INDEX PIP_NO_INDEX; do
        eval "value=\${$name:-}"
        [ -z "$value" ] || set -- "$@" --build-arg "$name=$value"
    done
    $ENGINE build ${BUILD_NETWORK:+--network "$BUILD_NETWORK"} -f deploy/Dockerfile -t "$IMAGE" "$@" .
    echo "the image is built: $(minutes)"
fi

ended() { status=$?; [ -n "${KEEP:-}" ] || compose down --volumes --timeout 10; exit $status; }
trap ended EXIT
trap 'exit 130' INT TERM
compose up -d
failed= all='classes="0,1,2,3,4,5,6,7,8,9"' private='epsilon=1.0 delta=1e-5'
for method in $METHODS; do
    case $method in
        fedpft | dp-*) settings="method=\"$method\" $private $all" ;;
        chain) settings='method="fedpft" fedpft.topology="chain"' ;;
        fedlap) settings="method=\"fedlap\" fedlap.model=\"mlp\" fedlap.rounds=3 $all" ;;
        dpcvae | dpcgan) settings="method=\"$method\" dpcvae.rounds=3 $all" ;;
        *) settings="method=\"$method\"" ;;
    esac
    case $method in *fed*avg | *fedprox | fedyogi | fedsgd | scaffold | dsfl | fedlambda | knn-per)
        settings="$settings fedavg.rounds=2" ;;
    esac
    echo "== $method: $settings"
    compose exec -T superlink coordinator run -c "$settings sites=3 deadline=900.0" || failed="$failed $method"
    echo "== $method has ended: $(minutes)"
done
mkdir -p "$DEMO_OUT"
compose exec -T superlink tar -C /runs --exclude=./signing -cf - . | tar -C "$DEMO_OUT" --no-same-owner -xf -
echo "reports: $(ls -d "$DEMO_OUT"/*/report.html | tr '\n' ' ')"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }

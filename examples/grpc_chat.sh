#!/usr/bin/env bash
# The same with grpcurl, which learns the service by reflection: examples/grpc_chat.sh localhost:9000 picture.png
set -euo pipefail
request=$(printf '{"model": "demo", "temperature": 0, "messages": [{"role": "user", "parts": [{"image": "%s"}, {"text": "%s"}]}]}' \
    "$(base64 -w0 "$2")" "What is in the picture?")
printf %s "$request" | grpcurl -plaintext -d @ "$1" chiasm.v1.Gateway/Chat

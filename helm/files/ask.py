"""The pod of `helm test`: is the server at argv[1] ready, and does it answer a question? Standard library only."""

import json
import os
import sys
import urllib.error
import urllib.request

url = sys.argv[1]
headers = {"content-type": "application/json"}
if os.environ.get("API_KEY"):
    headers["authorization"] = "Bearer " + os.environ["API_KEY"]
chat = {"model": "tgi", "max_tokens": 16, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def ask(path, body=None):
    """The text of the answer; leaves with 1 unless its status is 200."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=120) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.code}: {error.read().decode()}")
    except OSError as error:
        sys.exit(f"{path}: no answer: {error}")


sys.stdout.write("/readyz: " + ask("/readyz") + "\n")
answer = json.loads(ask("/v1/chat/completions", chat))
if not answer["choices"][0]["message"]["content"]:
    sys.exit("an empty answer: " + json.dumps(answer))
sys.stdout.write("/v1/chat/completions: " + answer["choices"][0]["message"]["content"] + "\n")

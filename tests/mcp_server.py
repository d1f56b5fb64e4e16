"""A server of the Model Context Protocol with two tools, over stdio: `python tests/mcp_server.py
[die | hang | repeat]`."""

import json
import sys
import time

TOOLS = [
    {"name": "add", "description": "The sum.", "inputSchema": {"type": "object"}, "annotations": {"title": "left out"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
]

NOTICE = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "at work"}}


def answer(message: dict, calls: list[str]) -> dict:
    """The result of a request, or its error."""
    match message["method"]:
        case "initialize":
            return {
                "result": {
                    "protocolVersion": message["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "two tools", "version": "1"},
                }
            }
        case "tools/list":
            page = int(message.get("params", {}).get("cursor", 0))
            more = {"nextCursor": str(page + 1)} if page + 1 < len(TOOLS) else {}
            if sys.argv[1:] == ["repeat"]:
                more = {"nextCursor": "0"}
            return {"result": {"tools": TOOLS[page : page + 1], **more}}
        case "tools/call":
            calls.append(message["params"]["name"])
            if calls[-1] == "fail":
                return {"result": {"content": [{"type": "text", "text": "no luck"}], "isError": True}}
            if not (arguments := message["params"]["arguments"]):
                return {"error": {"code": -32602, "message": "a and b are missing"}}
            parts = [
                {"type": "text", "text": str(arguments["a"] + arguments["b"])},
                {"type": "image", "data": "", "mimeType": "image/png"},
            ]
            return {"result": {"content": parts}}
    return {"error": {"code": -32601, "message": message["method"]}}


def main() -> None:
    calls: list[str] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        if message["method"] == "tools/call":
            if sys.argv[1:] == ["die"]:
                sys.exit()
            if sys.argv[1:] == ["hang"]:
                time.sleep(1000)
            # between a request and its answer a server may ask and tell
            print(json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"}), flush=True)
            assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "p", "result": {}}
            print(json.dumps(NOTICE), flush=True)
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer(message, calls)}), flush=True)


if __name__ == "__main__":
    main()

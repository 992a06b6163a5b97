"""A valid body for each route, with as many of its fields as go together; and valid queries."""

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = [{"type": "input_text", "text": "hi"}, {"type": "output_text", "text": "é\U0001f642"}]
BODIES = {
    "/v1/responses": {
        "model": "org/chat", "instructions": "Be brief.", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "input": [{"role": "user", "content": TEXT}, {"type": "reasoning", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "ls"}],
        "tools": [{"type": "function", "name": "f", "parameters": WEATHER, "strict": True},
                  {"type": "custom", "name": "g", "format": {"type": "text"}},
                  {"type": "custom", "name": "h", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
                  {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": True, "metadata": {"a": "b"},
        "truncation": "auto", "stream": False, "previous_response_id": None},
    "/v1/messages": {
        "model": "org/chat", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "é\U0001f642"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False,
                                          "content": [{"type": "text", "text": "sunny"}]},
                                         {"type": "document", "source": {"type": "text", "data": "d"}}]},
            {"role": "assistant", "content": "It"}],
        "tools": [{"name": "f", "input_schema": WEATHER}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"}, "metadata": {"user_id": "me"}, "stream": False},
}
BODIES |= {
    "/api/chat": {
        "model": "org/chat:latest", "stream": False, "think": True, "format": {"type": "object"}, "keep_alive": "5m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
                     {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                         {"function": {"name": "f", "arguments": {"city": "Rome"}}}]},
                     {"role": "tool", "tool_name": "f", "content": "sunny"}, {"role": "assistant", "content": "It"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "x", "parameters": WEATHER}}],
        "options": {"num_predict": 3, "temperature": 0.5, "top_k": 5, "stop": ["x"], "repeat_penalty": 1.1, "seed": 1,
                    "num_ctx": 64}, "logprobs": True, "top_logprobs": 1},
    "/api/generate": {
        "model": "org/chat", "prompt": "hi", "system": "Be brief.", "raw": False, "context": [3, 4], "stream": False,
        "suffix": "", "images": [], "template": "", "format": "json", "think": False,
        "options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "mirostat": 0}, "keep_alive": 60},
    "/v1/rerank": {"model": "encoder", "query": "a", "documents": ["b", {"text": "c", "id": 1}], "top_n": 1,
                   "return_documents": True, "truncate": True},
    "/v1/score": {"model": "encoder", "text_1": "a", "text_2": ["b", "c"]},
    "/tokenize": {"content": "hi", "with_pieces": True, "add_special": True, "parse_special": False},
    "/api/embed": {"model": "encoder", "input": ["a", "b"], "truncate": True, "dimensions": 0, "options": {"a": 1}},
    "/api/show": {"model": "org/chat", "name": "x", "verbose": True},
    "/api/pull": {"model": "org/chat", "stream": False, "insecure": False},
}
BODIES |= {
    "/v1/chat/completions": {
        "model": "org/chat", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["x"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "é\U0001f642"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"}, {"role": "user", "content": "and?"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "x", "parameters": WEATHER,
                                                    "strict": True}}],
        "functions": None, "function_call": None,
        "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "logprobs": True,
        "top_logprobs": 1, "stream": False, "stream_options": None, "presence_penalty": 0.1, "logit_bias": {"20": 1},
        "reasoning_effort": None, "chat_template_kwargs": {"enable_thinking": False}, "user": "me"},
    "/v1/completions": {
        "model": "org/chat", "prompt": ["hi", "you"], "max_tokens": 3, "echo": True, "logprobs": 1, "stop": "x", "n": 1,
        "best_of": 1, "suffix": None, "logit_bias": {"20": 1}, "stream": False, "seed": 1, "min_p": 0.1},
    "/v1/embeddings": {"model": "encoder", "input": ["paris", "is"], "encoding_format": "float", "dimensions": None},
    "/": {"text": "hi", "decoding_alg": "sample.top_p", "is_streaming_mode": False, "max_output_len": 3,
          "random_seed": 1, "temperature": 0.5, "system_prompt": "x", "res_prefix": ""},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
BODIES["/chat/completions"] = {  # with functions
    name: value for name, value in BODIES["/v1/chat/completions"].items() if name not in ("tools", "tool_choice")} | {
        "functions": [{"name": "f", "description": "x"}], "function_call": {"name": "f"}, "messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "sunny"}]}
BODIES["POST /v1/chat/completions"] = {  # with custom tools
    "model": "org/chat", "max_tokens": 9, "temperature": 1, "stream": False, "tools": [
        {"type": "custom", "custom": {"name": "g", "format": {
            "type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a" | /[b-d]/'}}}}],
    "tool_choice": {"type": "custom", "custom": {"name": "g"}}, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "d", "type": "custom", "custom": {"name": "g", "input": "ls"}}]},
        {"role": "tool", "tool_call_id": "d", "content": "sunny"}]}
BODIES |= {
    "/infill": {
        "model": "filler", "input_prefix": "def f(", "input_suffix": "return x", "prompt": "x", "n_predict": 3,
        "input_extra": [{"filename": "a.py", "text": "y = 1"}], "temperature": 0.5, "stop": ["x"], "stream": False},
    "/translate": {"model": "translator", "text": ["en", "fr"], "source": "en", "target": "fr", "num_beams": 2,
                   "max_tokens": 3},
    "/fill-mask": {"model": "encoder", "text": "paris is [MASK] .", "top_k": 2},
    "/v1/classify": {"model": "classifier", "input": ["paris", "is"], "truncate": True},
    "/v1/responses/input_tokens": {**BODIES["/v1/responses"], "previous_response_id": None},
    "GET /tokenizer_info": {},
    "/detokenize": {"model": "org/chat", "tokens": [20, 21, 1], "skip_special": True},
    "/apply-template": {"model": "org/chat", "messages": BODIES["/v1/chat/completions"]["messages"],
                        "tools": BODIES["/v1/chat/completions"]["tools"],
                        "chat_template_kwargs": {"enable_thinking": True}},
    "/api/embeddings": {"model": "encoder", "prompt": "a", "options": {"a": 1}, "keep_alive": "1m"},
    "DELETE /api/delete": {"model": "org/chat", "name": "x"},
    **{f"/slots/{at}": {"model": "org/chat", "filename": "talk"} for at in range(3)},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True, "scale": 0.5},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "GET /slots": {}, "GET /props": {}, "GET /v1/models/org/chat": {}, "GET /v1/responses/resp_1/input_items": {},
    "GET /explore/kv": {}, "GET /explore/quantisation": {}, "GET /explore/roofline": {}, "GET /explore/timeline": {},
    "GET /v1/responses/resp_1": {}, "DELETE /v1/responses/resp_1": {},
}
QUERIES = {  # route -> a valid query; damaged like the bodies
    **{f"/slots/{at}": {"action": name, "model": "org/chat"} for at, name in enumerate(("save", "restore", "erase"))},
    "GET /slots": {"model": "org/chat"}, "GET /props": {"model": "org/chat"},
    "GET /tokenizer_info": {"model": "org/chat"},
    "GET /v1/responses/resp_1/input_items": {"limit": "3", "order": "asc"},
    "GET /v1/responses/resp_1": {"stream": "false"},
    "GET /explore/kv": {"model": "org/chat"},
    "GET /explore/quantisation": {"model": "org/chat", "tensor": "lm_head.weight", "scheme": "q3h", "row": "1"},
    "GET /explore/roofline": {"model": "org/chat"},
    "GET /explore/timeline": {"model": "org/chat", "cluster": "v100x4-pcie", "devices": "0;1", "batch": "1",
                              "tokens": "1", "context": "9"},
}
REFUSED = {"/slots/0", "/slots/1", "/slots/2", "DELETE /api/delete", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
           "GET /explore/roofline", "GET /explore/quantisation"}  # may be refused even if undamaged

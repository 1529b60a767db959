"""The plugin for stock SGLang (entry point group `sglang.srt.plugins`): what its `--kt-*` flags lack beside
`kt_kernel`; docs/sglang.md is its page. In the plugin no module but `method`, `adapters` and `streaming` imports torch,
and those are imported in SGLang's scheduler processes alone. `command` starts SGLang for `kt serve`."""

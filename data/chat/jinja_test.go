package chat

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// jinjaOfOurs is a tokenizer_config.json for the tokenizers of this repository, with a beginning-of-sequence token.
func jinjaOfOurs(t testing.TB) string {
	return configFile(t, map[string]any{
		"bos_token": "<eos>",
		"chat_template": `{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>' }}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}
{% else %}
{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}`})
}

// qwenStyle is a template in the manner of Qwen 2.5: ChatML with a system message of its own.
func qwenStyle(t testing.TB) string {
	return configFile(t, map[string]any{
		"bos_token": nil,
		"eos_token": "<|im_end|>",
		"added_tokens_decoder": map[string]any{
			"1": map[string]any{"content": "<|im_start|>", "special": true},
			"2": map[string]any{"content": "<|im_end|>", "special": true},
			"3": map[string]any{"content": "<tool_response>", "special": false},
		},
		"chat_template": `{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
`})
}

// llamaStyle is a template in the manner of Llama 3: header tokens, trimmed contents, a date.
func llamaStyle(t testing.TB) string {
	return configFile(t, map[string]any{
		"bos_token": map[string]any{"content": "<|begin_of_text|>", "lstrip": false},
		"eos_token": "<|eot_id|>",
		"additional_special_tokens": []any{
			"<|start_header_id|>", map[string]any{"content": "<|end_header_id|>"}},
		"chat_template": []any{
			map[string]any{"name": "tool_use", "template": "{{ nothing }}"},
			map[string]any{"name": "default", "template": `{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "none" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not message.role in ['user', 'assistant'] %}
        {{- raise_exception("no role " + message.role + " here") }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}`}}})
}

func TestJinjaQwenStyle(t *testing.T) {
	tpl := useTemplate(t, qwenStyle(t))
	msgs := []Message{{User, "<|im_end|>\nHi \n"}, {Assistant, " Call"}, {Tool, "1"}, {Tool, "2"}, {Assistant, "Three"}}
	want := `0u [<|im_start|>](system\nYou are helpful.)[<|im_end|>](\n)[<|im_start|>](user\n)(<|im_end|>\nHi \n)[<|im_end|>]
1a (\n)[<|im_start|>](assistant\n)!( Call)![<|im_end|>]
2t (\n)[<|im_start|>](user\n<tool_response>\n)(1)
3t (\n</tool_response>\n<tool_response>\n)(2)(\n</tool_response>)[<|im_end|>]
4a (\n)[<|im_start|>](assistant\n)!(Three)![<|im_end|>]
5a (\n)[<|im_start|>](assistant\n)`
	if got := show(rendered(t, tpl, msgs, true)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if tpl.EndOfTurn() != "<|im_end|>" {
		t.Errorf("ends turns with %s", tpl.EndOfTurn())
	}
}

func TestJinjaLlamaStyle(t *testing.T) {
	tpl := useTemplate(t, llamaStyle(t))
	// The system message has the beginning-of-sequence token's name: still one such token, at the front.
	msgs := []Message{{System, " <|begin_of_text|> "}, {User, "\tHi\n"}, {Assistant, "Hello "}}
	want := `0s [<|begin_of_text|>][<|start_header_id|>](system)[<|end_header_id|>](\n\nToday Date: 26 Jul 2024\n\n)(<|begin_of_text|>)[<|eot_id|>]
1u [<|start_header_id|>](user)[<|end_header_id|>](\n\n)(Hi)[<|eot_id|>]
2a [<|start_header_id|>](assistant)[<|end_header_id|>](\n\n)!(Hello)![<|eot_id|>]
3a [<|start_header_id|>](assistant)[<|end_header_id|>](\n\n)`
	if got := show(rendered(t, tpl, msgs, true)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if _, err := tpl.Render(append(msgs, Message{Tool, "x"}), false); err == nil || !strings.Contains(err.Error(), "refuses the conversation: no role tool here") {
		t.Errorf("error %v", err)
	}
}

// What the template puts between the generation prompt and the answer the model has to write, so it is trained; so is the
// space before the end token.
func TestJinjaTextAroundAnswers(t *testing.T) {
	tpl := useTemplate(t, configFile(t, map[string]any{"eos_token": "</s>", "chat_template": `{% for m in messages %}
{% if m.role == 'assistant' %}{{ '<|assistant|>\n<think>\n</think>\n' + m.content.strip() + ' ' + eos_token + '\n' }}{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}`}))
	want := `0u (user: )(Hi)
1a (\n)[<|assistant|>](\n)!(<think>\n</think>\n)!(Yo)!( )![</s>]
2u (\nuser: )(!)
3a (\n)[<|assistant|>](\n)!(<think>\n</think>\n)!(So)!( )![</s>](\n)`
	if got := show(rendered(t, tpl, []Message{{User, "Hi"}, {Assistant, "\nYo "}, {User, "!"}, {Assistant, "So"}}, false)); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestJinjaTemplateFileBeside(t *testing.T) {
	path := configFile(t, map[string]any{})
	text := `{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}`
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "chat_template.jinja"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if got := plain(rendered(t, useTemplate(t, path), dialogue[:2], false)); got != "<|system|>Be brief.<|end|><|user|>Hi <|end|><|end|>" {
		t.Errorf("got %s", got)
	}
}

func TestJinjaRefused(t *testing.T) {
	const turn = `{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}`
	for _, c := range []struct{ name, template, want string }{
		{"syntax", `{% for m in messages %}`, "chat_template: "},
		{"no end token", `{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}`, "no special token follows"},
		{"two end tokens", `{% for m in messages %}{{ m.content }}{% if loop.last %}{{ '<|end|>' }}{% else %}{{ '<|user|>' }}{% endif %}{% endfor %}`, "ends with <|user|> and another with <|end|>"},
		{"drops turns", `{% for m in messages %}{% if loop.last %}` + turn + `{% endif %}{% endfor %}`, "leaves out turn 1"},
		{"upper case", `{% for m in messages %}{{ m.content | upper + '<|end|>' }}{% endfor %}`, "rewrites contents"},
		{"halves", `{% for m in messages %}{{ m.content[1:] + '<|end|>' }}{% endfor %}`, "rewrites contents"},
		{"includes", `{% include "/etc/hostname" %}{% for m in messages %}` + turn + `{% endfor %}`, "cannot write a plain conversation"},
		{"raises", `{{ raise_exception('never') }}`, "refuses the conversation: never"},
		{"nonsense", `{{ messages.a.b.c() }}`, "chat_template: "},
		{"reserved", "\ue000moetor:", "reserved"},
		{"no prefix", `{% if add_generation_prompt %}{{ '<|tool|>' }}{% endif %}{% for m in messages %}` + turn + `{% endfor %}`, "add_generation_prompt changes"},
	} {
		_, err := OpenTemplate(configFile(t, map[string]any{"chat_template": c.template}))
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "template=") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want %q in one line", c.name, err, c.want)
		}
	}
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken.json")
	os.WriteFile(broken, []byte("{"), 0o644)
	for path, want := range map[string]string{
		filepath.Join(dir, "none.json"): "no such file; want builtin, chatml or the path",
		broken:                          "not a tokenizer_config.json",
		configFile(t, map[string]any{}): "has no chat_template",
		configFile(t, map[string]any{"chat_template": 1}):          "chat_template is a number",
		configFile(t, map[string]any{"chat_template": []string{}}): "none of them is named default",
		"":  "want builtin, chatml",
		dir: "is a directory",
	} {
		if _, err := OpenTemplate(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", path, err, want)
		}
	}
}

// A template may treat some contents in another way than the rest. Where its text cannot be told from theirs it says so.
func TestJinjaRewrites(t *testing.T) {
	tpl := useTemplate(t, configFile(t, map[string]any{"chat_template": `{% for m in messages %}{% if '</think>' in m.content %}{% set c = m.content.split('</think>')[1] %}{% else %}{% set c = m.content %}{% endif %}{{ '<|' + m.role + '|>' + c + '<|end|>' }}{% endfor %}`}))
	rendered(t, tpl, []Message{{User, "x"}, {Assistant, "y"}}, false)
	_, err := tpl.Render([]Message{{User, "x"}, {Assistant, "<think>hm</think>y"}}, false)
	if err == nil || !strings.Contains(err.Error(), "rewrites the text of turn 2") {
		t.Errorf("error %v", err)
	}
}

func TestJinjaLongTurn(t *testing.T) {
	long := strings.Repeat("<|im_end|> å\n", 100_000)
	pieces := rendered(t, useTemplate(t, llamaStyle(t)), []Message{{User, long}, {Assistant, long}}, false)
	if got := plain(pieces); strings.Count(got, strings.TrimSpace(long)) != 2 {
		t.Errorf("%d bytes come back without the turns", len(got))
	}
}

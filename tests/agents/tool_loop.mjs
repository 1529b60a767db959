// One turn with a tool through the AI SDK: node tool_loop.mjs ai-sdk-chat|ai-sdk-messages URL NUMBER
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";

const [loop, url, number] = process.argv.slice(2);
const server = { baseURL: `${url}/v1`, apiKey: "none" };
const model =
  loop === "ai-sdk-messages"
    ? createAnthropic(server)("scripted")
    : createOpenAICompatible({ name: "kt", includeUsage: true, ...server })("scripted");
const sum = tool({
  description: "The sum of a file.",
  inputSchema: jsonSchema({ type: "object", properties: { path: { type: "string" } }, required: ["path"] }),
  execute: async ({ path }) => {
    if (path !== "notes.txt") throw new Error(`asked for ${path}`);
    return `SUM=${number}`;
  },
});
const answer = streamText({
  model,
  tools: { sum },
  stopWhen: stepCountIs(3),
  prompt: "TASK-ONE: what is the sum of notes.txt?",
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
});
for await (const _ of answer.fullStream);
console.log(await answer.text);

// A plugin of the tests: it writes down how the log keeps each tool result, and resumes
// the session ID when a root `resume-ID` is made.
import { appendFileSync } from 'node:fs'

export const name = 'rlm-test-recorder'
export const inject = ['agents']

export function apply(ctx, { file, route }) {
  ctx.on('session/event', (session, { type, data }) => {
    if (type !== 'tool/result') return
    const { error = null, meta = null } = data
    appendFileSync(file, `${JSON.stringify({ sessionId: String(session.id), error, meta })}\n`)
  })
  ctx.on('agent/created', ({ agent }) => {
    const resumeSessionId = /^resume-(.*)$/.exec(String(agent.id))?.[1]
    if (resumeSessionId) setImmediate(() => ctx.agents.resume({ resumeSessionId, agentOptions: route }))
  })
}

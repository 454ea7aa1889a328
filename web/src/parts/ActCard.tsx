import { statementHook, type JobFigures } from '../model/figures'
import type { Act } from '../model/act'
import { ACT } from '../words/job'
import { NodeLink, RunbookLink, ToneIcon, Unbroken } from './Basics'

/** What a person must do for a job, or can do later: the reason, and the steps in order. */
export function ActCard({ act, figures }: { act: Act; figures: JobFigures }) {
  return (
    <section className={`card act tone-${act.tone}`} aria-live="polite" aria-label={ACT.title} {...statementHook(figures, 'act', act)}>
      <header>
        <h2>
          <ToneIcon tone={act.tone} /> {act.title}
        </h2>
        {act.section && <RunbookLink section={act.section} />}
      </header>
      <p>
        <Unbroken text={act.text} />
      </p>
      {act.steps.length > 0 && (
        <ol>
          {act.steps.map((step) => (
            <li key={step}>
              <Step text={step} nodes={act.nodes} />
            </li>
          ))}
        </ol>
      )}
    </section>
  )
}

/** A command at the end of a step. */
const COMMAND = /^(.*: )((?:everstep|aws) [^:]*)$/

/** One step. A node's id at its beginning links to the node, and a command at its end is set as code. */
function Step({ text, nodes }: { text: string; nodes: Act['nodes'] }) {
  const id = nodes?.ids.find((each) => text.startsWith(`${each}:`))
  if (id !== undefined) {
    return (
      <>
        <NodeLink id={id} fleet={nodes?.fleet} />
        {text.slice(id.length)}
      </>
    )
  }
  const [, before = text, command] = COMMAND.exec(text) ?? []
  return (
    <>
      <Unbroken text={before} />
      {command && <code>{command}</code>}
    </>
  )
}

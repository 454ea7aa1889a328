import type { Event } from '../contract'
import { rankWords, stacksOf } from '../model/stacks'

/** The stacks of ranks in an event, folded. Shows nothing for an event without stacks. */
export function Stacks({ event }: { event: Pick<Event, 'Detail'> }) {
  return (
    <>
      {stacksOf(event).map((stack) => (
        <details key={stack.ranks.join()}>
          <summary>Stack of {rankWords(stack.ranks)}</summary>
          <pre className="log wrap" tabIndex={0}>
            {stack.text}
          </pre>
        </details>
      ))}
    </>
  )
}

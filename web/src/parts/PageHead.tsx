/** The head of every page: where it is, its name, what can be done there, and one sentence that says how things are. */
import type { ReactNode } from 'react'

import type { Tone } from '../model/standing'
import { DUTY } from '../words/duty'
import { ToneIcon, Unbroken, useIsStale } from './Basics'

/** The one sentence of a page: `lead` is set in the color of its tone, `text` follows. */
export interface VerdictLine {
  tone: Tone
  lead: string
  text?: string
  /** Whether the line itself says that the control plane does not answer. */
  namesOutage?: boolean
}

const OUTAGE: VerdictLine = { tone: 'bad', ...DUTY.outage }

interface Head {
  /** Links to the pages above, separated by slashes. */
  crumbs?: ReactNode
  title: ReactNode
  /** Status badges beside the title. */
  status?: ReactNode
  actions?: ReactNode
  verdict?: VerdictLine
}

/** While the control plane does not answer, this outage replaces the sentence: the page does not know what is to do. */
export function PageHead({ crumbs, title, status, actions, verdict }: Head) {
  const isStale = useIsStale()
  return (
    <div className="head">
      {crumbs && <div className="crumbs">{crumbs}</div>}
      <div className="title">
        <div className="row">
          <h1>{title}</h1>
          {status}
        </div>
        {actions && <div className="row">{actions}</div>}
      </div>
      {verdict && <Verdict line={isStale && !verdict.namesOutage ? OUTAGE : verdict} />}
    </div>
  )
}

/** Screen readers hear a verdict when it changes. */
export function Verdict({ line }: { line: VerdictLine }) {
  return (
    <p className={`verdict tone-${line.tone}`} role="status" data-figure="verdict" data-tone={line.tone}>
      <ToneIcon tone={line.tone} />
      <span>
        <strong>
          <Unbroken text={line.lead} />
        </strong>
        {line.text && (
          <>
            {' '}
            <Unbroken text={line.text} />
          </>
        )}
      </span>
    </p>
  )
}

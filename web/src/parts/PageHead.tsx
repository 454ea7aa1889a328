/** The head of every page: where it is, its name, what can be done there, and one sentence that says how things are. */
import type { ReactNode } from 'react'

import type { Tone } from '../model/standing'
import { ToneIcon, Unbroken } from './Basics'

/** The one sentence of a page: `lead` is set in the colour of its tone, `text` follows. */
export interface VerdictLine {
  tone: Tone
  lead: string
  text?: string
}

interface Head {
  /** Links to the pages above, separated by slashes. */
  crumbs?: ReactNode
  title: ReactNode
  /** Status badges beside the title. */
  status?: ReactNode
  actions?: ReactNode
  verdict?: VerdictLine
}

export function PageHead({ crumbs, title, status, actions, verdict }: Head) {
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
      {verdict && <Verdict line={verdict} />}
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

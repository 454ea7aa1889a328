/** The head of every page: links to the pages above, title, buttons, and the verdict, a sentence about the state. */
import { useDocumentTitle } from '@mantine/hooks'
import type { ReactNode } from 'react'

import type { VerdictLine } from '../model/standing'
import { SHELL } from '../words/shell'
import { ToneIcon, Unbroken, useIsStale } from './Basics'

interface Head {
  /** Links to the pages above, separated by slashes. */
  crumbs?: ReactNode
  title: ReactNode
  /** Status badges beside the title. */
  status?: ReactNode
  actions?: ReactNode
  verdict?: VerdictLine
}

/** While the control plane does not answer, the head shows the last known verdict in grey. `Shell` says why. */
export function PageHead({ crumbs, title, status, actions, verdict }: Head) {
  const isStale = useIsStale() || verdict?.isStale
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
      {verdict && <Verdict line={isStale ? { tone: 'idle', lead: SHELL.lastKnown(verdict.lead) } : verdict} />}
    </div>
  )
}

/** A page whose title is also the title of the document. */
export function Page({ title, children, ...head }: Head & { title: string; children: ReactNode }) {
  useDocumentTitle(`${title}, Everstep`)
  return (
    <div className="stack">
      <PageHead title={title} {...head} />
      {children}
    </div>
  )
}

/** The verdict as a live region: screen readers announce its changes. */
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

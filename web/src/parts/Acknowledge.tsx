import { call } from '../api/client'
import type { Incident } from '../contract'
import { INCIDENT } from '../words/incident'
import { ActionButton } from './ActionButton'

/** The button that acknowledges an incident, for a role that may do so, until a person has used it. */
export const Acknowledge = ({ incident: { IncidentId, AcknowledgementTime } }: { incident: Incident }) =>
  AcknowledgementTime === undefined ? (
    <ActionButton
      operation="AcknowledgeIncident"
      title={INCIDENT.acknowledgeNote}
      action={() => call('AcknowledgeIncident', { IncidentId })}
    >
      {INCIDENT.acknowledge}
    </ActionButton>
  ) : null
